"""Supervised fine-tuning: imitate demonstrations. All base models are made this way, including the built-in ones.

demos.py ─► DemoSet (frames, actions) ─► action tokens ─► cross-entropy over the action ids ─► checkpoint
                                      └► actions ─► absolute error of the regression head ─┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from vlarl.config.derive import default_run_name
from vlarl.config.finetune import FinetuneConfig, FinetuneOptimConfig, FinetunePolicyConfig
from vlarl.config.paths import located
from vlarl.config.source.load import to_yaml
from vlarl.config.training_data import by_demonstrations
from vlarl.data.batches import DemoBatch, DemoBatches
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, collect_demos, open_sources
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.statistics import dataset_statistics
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.devices import choose_device
from vlarl.envs.tabletop.geometry import PROPRIO_HIGH, PROPRIO_LOW
from vlarl.errors import UsageError, VlarlError
from vlarl.observability.machine import available_cores
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.progress import Progress
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.sinks import JsonlSink
from vlarl.policies.fresh import FRESH
from vlarl.policies.load import DTYPES, checkpoint_folder, load_configured
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.weights import has_component
from vlarl.policies.tiny import IMAGE_SIZE, init_tiny, unit_statistics
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.optim import build_adamw, set_lr, warmup_cosine

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class FinetuneSummary:
    """The result of a supervised run."""

    run_dir: Path
    checkpoint: Path
    first_loss: float
    last_loss: float
    demo_success: float  # fraction of demonstrations that reached their goal


def finetune(config: FinetuneConfig) -> FinetuneSummary:
    """Collect demonstrations, imitate them, and save a checkpoint in the run directory."""
    root, name = config.run.root, config.run.name or default_run_name("finetune", config.run.seed, datetime.now())
    RunDirectory.refuse_existing(root, name)
    device = choose_device(config.run.device)
    torch.set_num_threads(config.run.num_threads or available_cores())
    torch.manual_seed(config.run.seed)
    policy, sources = start(config, device)
    directory = RunDirectory.create(root, name)
    directory.write_config(to_yaml(located(config)))
    steps = config.optim.steps
    with directory.log_to_file(), directory.tracked(steps), Progress(steps) as progress:
        demos, demo_success = collect_demos(sources, progress.note)
        add_statistics(policy, demos)
        store, dtype = CheckpointStore(directory.checkpoints, keep=1), DTYPES[config.optim.save_dtype]
        with MetricLogger([JsonlSink(directory.metrics_file)]) as metrics:

            def on_log(step: int, row: dict[str, float]) -> None:
                metrics.log(step, row)
                progress.training(step, row)
                store.save_policy("final", policy, {"training_step": step, "loss": row["train/loss"]}, dtype)

            first, last = imitate(policy, DemoBatches(demos, policy, device), config, on_log)
    return FinetuneSummary(directory.path, directory.checkpoints / "final", first, last, demo_success)


def start(config: FinetuneConfig, device: torch.device) -> tuple[OpenVLAPolicy, list[DemoSource]]:
    """The policy to train, frozen and adapted as configured, and the sources of its demonstrations.

    A checkpoint defines how many views of which size it reads. A fresh model takes its sizes from the demonstrations.
    """
    settings, seed = config.policy, config.run.seed
    if settings.path in FRESH:
        size = config.demos.image_size or IMAGE_SIZE
        sources = open_sources(config.demos, seed, size, settings.num_images or 1)
        policy = fresh_policy(settings, seed, sources[0], size).to(device)
    else:
        policy = load_configured(settings, settings.path, device, actions=start_actions(settings))
        size = config.demos.image_size or policy.image_size
        sources = open_sources(config.demos, seed, size, policy.num_images)
    for source in sources:
        refuse_other_robot(policy, source)
    if settings.actions == "l1":
        policy.attach_l1_head(seed)
        policy.acts_by_regression = True
    policy.prepare_training(settings, config.lora, seed)
    recorded = [source.suite for source in sources if isinstance(source, RldsSource)]
    policy.training_data = policy.training_data.joined(by_demonstrations(config.demos, *recorded))
    return policy, sources


def start_actions(settings: FinetunePolicyConfig) -> Literal["tokens", "l1"]:
    """How to load the initial policy: with its regression head if that is trained and the checkpoint has one."""
    has_head = has_component(checkpoint_folder(settings.path), "action_head")
    return "l1" if settings.actions == "l1" and has_head else "tokens"


def fresh_policy(
    settings: FinetunePolicyConfig, seed: int, source: DemoSource, image_size: int = IMAGE_SIZE
) -> OpenVLAPolicy:
    """The tiny model with fresh weights, sized for a source's robot; its statistics come with the demonstrations."""
    try:
        return init_tiny(
            FRESH[settings.path],
            seed,
            chunk_length=settings.chunk_length,
            num_images=settings.num_images or 1,
            use_proprio=settings.use_proprio is not False,
            image_size=image_size,
            action_dim=source.action_dim,
            proprio_dim=source.proprio_dim,
            norm_stats={},
        )
    except ValueError as error:
        raise UsageError(f"policy: {settings.path} can't be made: {error}") from error


def refuse_other_robot(policy: OpenVLAPolicy, source: DemoSource) -> None:
    """Refuse demonstrations of a robot that the policy can't control."""
    has = f"{policy.action_dim} action dimensions"
    wants = f"{source.action_dim} action dimensions"
    if policy.config.use_proprio:
        has += f" and {policy.config.proprio_dim} of the robot's state"
        wants += f" and {source.proprio_dim} of the robot's state"
    if has != wants:
        raise UsageError(
            f"demos: the policy has {has}, the demonstrations of {source.name} have {wants}; name suites of one robot, "
            "and a checkpoint made for it."
        )


def add_statistics(policy: OpenVLAPolicy, demos: Sequence[DemoSet]) -> None:
    """Add the demonstrations' statistics to the policy, under their names, where it has none for them yet."""
    known = cast(dict[str, Mapping[str, Any]], policy.config.norm_stats)  # saved with its checkpoints
    for part in demos:
        if not {part.name, f"{part.name}_no_noops"} & set(known):
            known[part.name] = demo_statistics(part)


def demo_statistics(demos: DemoSet) -> Mapping[str, Any]:
    """The normalisation statistics of a set's robot: known for the tabletop, measured for all others."""
    if demos.name == TABLETOP:
        return unit_statistics(PROPRIO_LOW, PROPRIO_HIGH)
    return dataset_statistics(demos.actions, demos.proprio, len(demos.success))


def imitate(
    policy: OpenVLAPolicy,
    batches: DemoBatches,
    config: FinetuneConfig,
    on_log: Callable[[int, dict[str, float]], None],
) -> tuple[float, float]:
    """Train the policy on the demonstrations; returns the first and the last logged loss."""
    optim = config.optim
    optimizer = build_adamw(policy.parameters(), optim.lr, optim.weight_decay, BETAS)
    generator = torch.Generator().manual_seed(config.run.seed)
    logged: list[float] = []
    losses: list[float] = []  # of the steps since the last row that were not skipped
    norms: list[float] = []
    policy.train()
    started = time.monotonic()
    for step in range(1, optim.steps + 1):
        set_lr(optimizer, optim.lr * warmup_cosine(step, optim.steps, optim.warmup_steps))
        loss = imitation_loss(policy, batches.sample(optim.batch_size, generator), optim)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), optim.max_grad_norm)
        value, size = float(loss.detach()), float(norm)
        if np.isfinite([value, size]).all():  # an L1 loss that is not finite still has a finite gradient
            optimizer.step()
            losses.append(value)
            norms.append(size)
        if step % optim.log_interval == 0 or step == optim.steps:
            since = (step - 1) % optim.log_interval + 1
            if not losses:
                raise VlarlError(
                    f"loss or gradient were not finite in any of the {since} steps up to {step}: lower optim.lr (now "
                    f"{optim.lr}), or set optim.autocast to none"
                )
            logged.append(sum(losses) / len(losses))
            row = {
                "train/loss": logged[-1],
                "train/grad_norm": norms[-1],
                "train/skipped_steps": float(since - len(losses)),
                "train/lr": optimizer.param_groups[0]["lr"],
                "perf/train_samples_per_s": step * optim.batch_size / (time.monotonic() - started),
            }
            losses, norms = [], []
            on_log(step, row)
    return logged[0], logged[-1]


def imitation_loss(policy: OpenVLAPolicy, batch: DemoBatch, optim: FinetuneOptimConfig) -> torch.Tensor:
    """Mean cross-entropy over the action ids, the support that rollout samples from; or the regression head's error."""
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
        if policy.acts_by_regression:
            return F.l1_loss(policy.regress(batch.inputs), batch.actions.to(policy.heads_device))
        logits = policy.score(batch.inputs, batch.token_ids).logits
    return F.cross_entropy(logits.float().flatten(0, 1), (batch.token_ids - policy.codec.first_id).flatten())
