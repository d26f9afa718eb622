"""The options of `vlarl finetune`: demonstrations, policy and training. Imports neither torch nor a simulator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlarl.config.schema import (
    BelowOne,
    LoraConfig,
    Many,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RanksConfig,
    RunFolderConfig,
    Section,
    SinksConfig,
    Size,
    UnitInterval,
)

Gripper = Literal["closed_is_1", "open_is_1", "as_recorded"]


class DemoConfig(Section):
    """What is imitated: demonstrations of scripted experts, or recorded episodes."""

    suites: tuple[str, ...] = ("tabletop_spatial", "tabletop_object", "tabletop_goal", "tabletop_long")
    """Suites whose scripted experts provide the demonstrations."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Demonstrate only these tasks of each suite; by default all tasks."""
    path: str | None = None
    """RLDS or LeRobot folder of recorded episodes to imitate instead of scripted experts; its dataset's name is then
    the suite's. With demos.mixture, the folder that holds its datasets."""
    mapping: str | None = None
    """What the fields of recorded episodes mean: the name of a ready mapping, such as bridge_orig, or a YAML file with
    your own (docs/data.md). By default the ready mapping of an RLDS dataset's name, else the layout of `vlarl data
    record`."""
    mixture: tuple[str, ...] = ()
    """Several recorded datasets: NAME:WEIGHT for each, where NAME is its folder below demos.path, or the name of a
    ready mixture, such as oxe_magic_soup. Empty: the one dataset of demos.path."""
    mixture_weights: Literal["datasets", "frames"] | None = None
    """What the weights of a mixture mean: how often each dataset is sampled (datasets), or how often a frame of it is
    (frames), so that larger datasets are sampled more often. By default frames for ready mixtures, as OpenVLA has it,
    and datasets for your own."""
    dataset_name: str | None = None
    """LeRobot: the name of the suite that was recorded, such as libero_spatial; by default that of the folder."""
    gripper: Gripper | None = None
    """LeRobot: what the recorded gripper, the last dimension of an action, means. It becomes 1 for open and 0 for
    closed, as libero_* and metaworld_* have it; the tabletop, whose 1 closes, needs as_recorded: not converted.
    Required unless vlarl wrote the dataset or demos.mapping says it."""
    split: str = "train"
    """RLDS: split of a recorded dataset, by its name in dataset_info.json."""
    holdout: BelowOne = 0.0
    """Fraction of the episodes that is not trained on, but validated on (section validation). A hash of an episode
    decides, so that it stays held out when others are added. The same of the rows of reward.path, by their prompts."""
    views: tuple[Literal["primary", "wrist", "secondary"], ...] | None = None
    """Views of recorded episodes that the policy reads, in its order; by default the first policy.num_images of
    primary, wrist and secondary."""
    missing_views: Literal["stop", "black"] = "stop"
    """A view that a recorded dataset does not have: refuse the dataset (stop), or use black frames (black)."""
    noops: Literal["keep", "idle", "motionless"] | None = None
    """Steps of recorded episodes that do nothing: keep them, leave out those without movement and change of the gripper
    (idle), or those without movement (motionless). By default as the mapping says: motionless for DROID, else keep."""
    unlabeled: Literal["skip", "keep"] = "skip"
    """Recorded episodes whose instruction is empty: skip or keep them."""
    damaged: Literal["stop", "skip"] = "stop"
    """RLDS: recorded episodes that can't be read, because of a wrong checksum or content that contradicts itself: stop,
    or skip and count them. Either way the message names the file and the byte."""
    episodes_per_task: Many = 500
    """Demonstrations per task, each from its own initial state; LIBERO has a fixed list of states, of which those for
    training are used in turn."""
    image_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Side length of a rendered view in pixels; by default what the policy's processor reads. A fresh model reads views
    of this size, a multiple of 14; by default 56. Reward models read recorded views in this size, too."""
    only_successful: bool | None = None
    """Imitate only episodes that reach their goal; by default true for simulators whose experts fail by accident, and
    false where they fail on purpose, which is on the tabletop, and in LIBERO with close_high or release_early, and for
    recorded episodes."""
    close_high: UnitInterval | None = None
    """Tabletop and LIBERO: fraction of demonstrators that close the gripper too high; by default 0.35 on the tabletop
    and 0 in LIBERO."""
    release_early: UnitInterval | None = None
    """Tabletop and LIBERO: fraction of demonstrators that release the object too early; by default 0.55 on the tabletop
    and 0 in LIBERO."""
    action_noise: NonNegativeFloat = 0.1
    """Std of the noise on executed actions, so that demonstrations show recoveries."""
    hesitation: BelowOne = 0.0
    """Simulators: fraction of the time that experts pause, as human operators do."""
    num_workers: Size | None = None
    """Processes that run the experts; by default one per core, as far as the memory allows."""


class RewardTrainingConfig(Section):
    """A reward model that is trained in place of a policy, from policy.path: docs/rewards.md."""

    labels: Literal["none", "pairs", "steps", "episodes"] = "none"
    """What a reward model is trained on: rows of reward.path with a chosen and a rejected response (pairs), or with the
    steps of a response and their labels (steps); or demonstrations that succeed and fail (episodes), those of the
    section demos. none: a policy is trained."""
    path: str | None = None
    """Rows of pairs or steps: JSON lines, Parquet, or a folder that save_to_disk of Hugging Face datasets wrote."""
    states_per_episode: Many = 8
    """Episodes: frames of each that are trained on, evenly spaced; the first and the last one are among them."""
    step_discount: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Episodes: a frame of an episode that succeeds is labelled with this number to the power of the steps until its
    last frame, and one of an episode that fails with 0. 1 labels all frames of a success alike."""


class AugmentConfig(Section):
    """Random changes of training images, those of OpenVLA: a crop that is resized back, then colours."""

    enabled: bool = False
    """Change the images, each sample by random numbers that follow from run.seed and its index. Checkpoints that are
    trained with crops are then used with policy.center_crop."""
    crop_area: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of the image's area that the crop keeps; 1: no crop, which SmolVLA needs: it has no center crop."""
    brightness: UnitInterval = 0.2
    """Largest change of the brightness, of values between 0 and 1."""
    contrast: BelowOne = 0.2
    """Largest change of the factor of the contrast: 0.2 gives factors between 0.8 and 1.2."""
    saturation: BelowOne = 0.2
    """Largest change of the factor of the saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Largest turn of the hue, as a fraction of the whole circle."""


class FinetuneOptimConfig(Section):
    """Supervised training."""

    steps: PositiveInt = 10_000
    """Optimizer steps."""
    batch_size: Many = 1024
    """Samples per step, on all learner ranks together."""
    microbatch_size: Many | None = None
    """Samples per forward and backward pass, whose gradients add up to those of the batch: fewer need less memory. By
    default the whole batch is one pass, or a rank's part of it."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, after a linear warm-up and before a cosine decay."""
    warmup_steps: NonNegativeInt = 500
    """Optimizer steps of the warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay; not applied to biases, norms and other vectors."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Run the forward pass in this precision, with weights in float32; none: no autocast."""
    log_interval: PositiveInt = 100
    """Optimizer steps between rows of metrics.jsonl."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the policy in checkpoints. A run resumes from weights that are not rounded, which a checkpoint has
    beside it."""


class FinetunePolicyConfig(ModelConfig):
    """The policy that is fine-tuned."""

    path: str = "init:tiny-oft"
    """`init:tiny-oft`, `init:tiny-openvla`, `init:small-oft`, `init:tiny-smolvla` (fresh weights), a built-in model, a
    run's name or folder, a checkpoint folder or a hub id."""
    actions: Literal["tokens", "l1"] = "tokens"
    """What is trained: action tokens by cross-entropy, or OpenVLA-OFT's regression head by absolute error (l1)."""


class ValidationConfig(Section):
    """How the policy is measured on the episodes that are held out (demos.holdout)."""

    interval: PositiveInt = 500
    """Optimizer steps between validations; another one follows the last step."""
    samples: Many = 1024
    """Decisions of each dataset that a validation takes, evenly spaced over the held-out episodes."""
    patience: PositiveInt | None = None
    """Validations in a row without a new lowest val/l1, or val/loss of a reward model, after which training ends. By
    default it never ends early."""


class FinetuneCheckpointConfig(Section):
    """Which checkpoints are saved and kept."""

    interval: NonNegativeInt = 1000
    """Optimizer steps between checkpoints that a run resumes from; another one follows the last step. 0: none, only the
    final policy is saved."""
    keep: PositiveInt = 1
    """Checkpoints of steps that are kept, the newest ones."""
    max_total_gib: PositiveFloat | None = None
    """GiB that all checkpoints of the run may take together: the oldest ones of steps are removed until they fit; the
    newest one always stays. By default there is no limit."""


class FinetuneConfig(Section):
    """A supervised run: demonstrations in, checkpoint out; or labels in, reward model out."""

    run: RunFolderConfig = RunFolderConfig()
    policy: FinetunePolicyConfig = FinetunePolicyConfig()
    lora: LoraConfig = LoraConfig()
    demos: DemoConfig = DemoConfig()
    reward: RewardTrainingConfig = RewardTrainingConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: FinetuneCheckpointConfig = FinetuneCheckpointConfig()
    logging: SinksConfig = SinksConfig()
    distributed: RanksConfig = RanksConfig()
