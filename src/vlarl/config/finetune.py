"""The options of `vlarl finetune`: what is demonstrated, and who imitates it how. Imports no torch and no simulator."""

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
    """What is imitated: demonstrations of scripted experts, or recorded ones."""

    suites: tuple[str, ...] = ("tabletop_spatial", "tabletop_object", "tabletop_goal", "tabletop_long")
    """Suites that scripted experts demonstrate."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Demonstrate these tasks of each suite only; all tasks by default."""
    path: str | None = None
    """RLDS folder of recorded episodes to imitate instead of playing any; its dataset's name is the suite's then."""
    episodes_per_task: Many = 500
    """Demonstrations per task, each from an initial state of its own; LIBERO has only its fixed ones, of which those of
    training are used in turn."""
    image_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Pixels of a rendered view; by default what the policy's processor reads. A fresh model reads views of this size,
    a multiple of 14; by default 56."""
    only_successful: bool | None = None
    """Imitate nothing but episodes that reach their goal; by default in simulators, whose experts fail by accident, and
    not on the tabletop, whose experts fail on purpose."""
    close_high: UnitInterval = 0.35
    """Tabletop: share of demonstrators that close the gripper too high."""
    release_early: UnitInterval = 0.55
    """Tabletop: share of demonstrators that let go too early."""
    action_noise: NonNegativeFloat = 0.1
    """Standard deviation of the noise on executed actions, so that demonstrations show recoveries."""
    hesitation: BelowOne = 0.0
    """Simulators: share of the time that experts stand still, a while each, as people do at the controls."""
    num_workers: Size | None = None
    """Processes that play; by default one for each core, as far as the memory goes."""


class FinetuneOptimConfig(Section):
    """Supervised training."""

    steps: PositiveInt = 10_000
    """Optimizer steps."""
    batch_size: Many = 1024
    """Samples per step."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate of a linear warm-up and a cosine decay."""
    warmup_steps: NonNegativeInt = 500
    """Steps of warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay; biases, norms and other vectors are left alone."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Run the forward pass in this precision, weights staying float32."""
    log_interval: PositiveInt = 100
    """Steps between rows of metrics.jsonl, and between saves."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the saved weights."""


class StartConfig(ModelConfig):
    """The model that imitates."""

    path: str = "init:tiny-oft"
    """`init:tiny-oft`, `init:tiny-openvla` (fresh weights), a built-in model, a run's name or folder, a checkpoint
    folder or a hub id."""
    actions: Literal["tokens", "l1"] = "tokens"
    """What imitates: action tokens by cross-entropy, or OpenVLA-OFT's regression head by absolute error."""


class FinetuneConfig(Section):
    """A supervised run: demonstrations in, checkpoint out."""

    run: RunFolderConfig = RunFolderConfig()
    policy: StartConfig = StartConfig()
    lora: LoraConfig = LoraConfig()
    demos: DemoConfig = DemoConfig()
    optim: FinetuneOptimConfig = FinetuneOptimConfig()
