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
    RunFolderConfig,
    Section,
    Size,
    UnitInterval,
)


class DemoConfig(Section):
    """What is imitated: demonstrations of scripted experts, or recorded episodes."""

    suites: tuple[str, ...] = ("tabletop_spatial", "tabletop_object", "tabletop_goal", "tabletop_long")
    """Suites whose scripted experts provide the demonstrations."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Demonstrate only these tasks of each suite; by default all tasks."""
    path: str | None = None
    """RLDS folder of recorded episodes to imitate instead of scripted experts; its dataset's name is then the
    suite's."""
    episodes_per_task: Many = 500
    """Demonstrations per task, each from its own initial state; LIBERO has a fixed list of states, of which those for
    training are used in turn."""
    image_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Side length of a rendered view in pixels; by default what the policy's processor reads. A fresh model reads views
    of this size, a multiple of 14; by default 56."""
    only_successful: bool | None = None
    """Imitate only episodes that reach their goal; by default true for simulators, whose experts fail by accident, and
    false for the tabletop, whose experts fail on purpose."""
    close_high: UnitInterval = 0.35
    """Tabletop: fraction of demonstrators that close the gripper too high."""
    release_early: UnitInterval = 0.55
    """Tabletop: fraction of demonstrators that release the object too early."""
    action_noise: NonNegativeFloat = 0.1
    """Std of the noise on executed actions, so that demonstrations show recoveries."""
    hesitation: BelowOne = 0.0
    """Simulators: fraction of the time that experts pause, as human operators do."""
    num_workers: Size | None = None
    """Processes that run the experts; by default one per core, as far as the memory allows."""


class FinetuneOptimConfig(Section):
    """Supervised training."""

    steps: PositiveInt = 10_000
    """Optimizer steps."""
    batch_size: Many = 1024
    """Samples per step."""
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
    """Optimizer steps between rows of metrics.jsonl, and between checkpoints."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the saved weights."""


class FinetunePolicyConfig(ModelConfig):
    """The policy that is fine-tuned."""

    path: str = "init:tiny-oft"
    """`init:tiny-oft`, `init:tiny-openvla` (fresh weights), a built-in model, a run's name or folder, a checkpoint
    folder or a hub id."""
    actions: Literal["tokens", "l1"] = "tokens"
    """What is trained: action tokens by cross-entropy, or OpenVLA-OFT's regression head by absolute error (l1)."""


class FinetuneConfig(Section):
    """A supervised run: demonstrations in, checkpoint out."""

    run: RunFolderConfig = RunFolderConfig()
    policy: FinetunePolicyConfig = FinetunePolicyConfig()
    lora: LoraConfig = LoraConfig()
    demos: DemoConfig = DemoConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
