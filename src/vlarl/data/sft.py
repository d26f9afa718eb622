"""Supervised fine-tuning: imitate demonstrations. This is how the built-in base models are made.

scripted experts ─► DemoSet (frames, actions) ─► action tokens ─► cross-entropy over the action ids ─► checkpoint
                                              └► actions ─► absolute error of the regression head ─┘
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from vlarl.config.derive import default_run_name
from vlarl.config.load import to_yaml
from vlarl.config.schema import Camera, DemoConfig, FinetuneConfig, FinetuneOptimConfig, StartConfig
from vlarl.data.demos import DemoSet, generate_demos
from vlarl.envs.tabletop.expert import ExpertFlaws
from vlarl.envs.tabletop.geometry import PROPRIO_HIGH, PROPRIO_LOW
from vlarl.errors import VlarlError
from vlarl.launch import choose_device
from vlarl.observability.files import write_atomically
from vlarl.observability.machine import available_cores
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.progress import Progress
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.sinks import JsonlSink
from vlarl.policies import DTYPES, checkpoint_folder, load_configured
from vlarl.policies.openvla.config import DecoderName
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.weights import has_component
from vlarl.policies.tiny import init_tiny
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.optim import build_adamw, set_lr, warmup_cosine
from vlarl.types import PolicyInput

BETAS = (0.9, 0.95)
FRESH: dict[str, DecoderName] = {"init:tiny-oft": "parallel", "init:tiny-openvla": "autoregressive"}


@dataclass(frozen=True)
class FinetuneSummary:
    """What a supervised run came to."""

    run_dir: Path
    checkpoint: Path
    first_loss: float
    last_loss: float
    demo_success: float  # share of demonstrations that reached their goal


@dataclass(frozen=True)
class Demonstrated:
    """A batch of demonstrated decisions."""

    inputs: PolicyInput
    actions: torch.Tensor  # [B, K, D] normalised
    token_ids: torch.Tensor  # [B, K*D] the tokens of these actions


class DemoBatches:
    """Demonstrations on the device, and batches drawn from them."""

    def __init__(self, demos: DemoSet, policy: OpenVLAPolicy, device: torch.device) -> None:
        first_frames = [int(np.argmax(demos.instruction_ids == i)) for i in range(len(demos.instructions))]
        self._prompts = policy.process([demos.observation(frame) for frame in first_frames]).to(device)
        self._images = torch.from_numpy(demos.images)
        self._instruction_ids = torch.from_numpy(demos.instruction_ids).to(device)
        self._proprio: torch.Tensor | None = None
        if policy.config.use_proprio:
            self._proprio = torch.from_numpy(policy.normalizer.normalize_proprio(demos.proprio)).to(device)
        chunks = policy.normalizer.normalize(demos.chunks(np.arange(len(demos)), policy.chunk_length))
        self._actions = torch.from_numpy(chunks).to(device)
        self._token_ids = torch.from_numpy(policy.codec.encode(chunks)).to(device)
        if device.type == "cuda":
            self._images = self._images.to(device)
        self._device = device

    def __len__(self) -> int:
        return len(self._instruction_ids)

    def draw(self, size: int, generator: torch.Generator) -> Demonstrated:
        """A random batch: what the policy sees, and what the demonstrator did."""
        rows = torch.randint(len(self), (size,), generator=generator)
        pixels = self._images[rows.to(self._images.device)].to(self._device).permute(0, 1, 4, 2, 3)
        rows = rows.to(self._device)
        which = self._instruction_ids[rows]
        proprio = None if self._proprio is None else self._proprio[rows]
        inputs = PolicyInput(self._prompts.input_ids[which], self._prompts.attention_mask[which], pixels, proprio)
        return Demonstrated(inputs, self._actions[rows], self._token_ids[rows])


def finetune(config: FinetuneConfig) -> FinetuneSummary:
    """Generate demonstrations, imitate them, and leave a checkpoint in the run directory."""
    root, name = config.run.root, config.run.name or default_run_name("finetune", config.run.seed, datetime.now())
    RunDirectory.refuse_existing(root, name)
    device = choose_device(config.run.device)
    torch.set_num_threads(config.run.num_threads or available_cores())
    torch.manual_seed(config.run.seed)
    policy = start_policy(config, device)
    directory = RunDirectory.create(root, name)
    write_atomically(directory.config_file, to_yaml(config))
    steps = config.optim.steps
    with directory.log_to_file(), directory.tracked(steps), Progress(steps) as progress:
        progress.note("playing demonstrations")
        demos = demonstrate(config.demos, config.run.seed, policy)
        progress.note(
            f"{len(demos):,} frames, {demos.success.mean():.1%} of {len(demos.success):,} demonstrations succeed"
        )
        store, dtype = CheckpointStore(directory.checkpoints, keep=1), DTYPES[config.optim.save_dtype]
        with MetricLogger([JsonlSink(directory.metrics_file)]) as metrics:

            def on_log(step: int, row: dict[str, float]) -> None:
                metrics.log(step, row)
                progress.training(step, row)
                store.save_policy("final", policy, {"training_step": step, "loss": row["train/loss"]}, dtype)

            first, last = imitate(policy, DemoBatches(demos, policy, device), config, on_log)
    return FinetuneSummary(directory.path, directory.checkpoints / "final", first, last, float(demos.success.mean()))


def start_actions(settings: StartConfig) -> Literal["tokens", "l1"]:
    """How to load the start: with its regression head where that is trained and the checkpoint has one."""
    has_head = settings.path not in FRESH and has_component(checkpoint_folder(settings.path), "action_head")
    return "l1" if settings.actions == "l1" and has_head else "tokens"


def start_policy(config: FinetuneConfig, device: torch.device) -> OpenVLAPolicy:
    """A fresh tiny model, or a checkpoint to go on from, frozen and adapted as configured."""
    settings = config.policy
    if config.policy.path in FRESH:
        policy = init_tiny(
            FRESH[config.policy.path],
            config.run.seed,
            chunk_length=config.policy.chunk_length,
            proprio_low=PROPRIO_LOW,
            proprio_high=PROPRIO_HIGH,
        )
        policy.to(device)
    else:
        policy = load_configured(settings, settings.path, device, actions=start_actions(settings))
        policy.use_statistics(None, config.demos.suites[0])
    if settings.actions == "l1":
        policy.attach_l1_head(config.run.seed)
        policy.acts_by_regression = True
    policy.prepare_training(settings, config.lora, config.run.seed)
    return policy


def demonstrate(config: DemoConfig, seed: int, policy: OpenVLAPolicy) -> DemoSet:
    """Let the configured demonstrators play, in the views and at the image size that the policy reads."""
    flaws = ExpertFlaws(config.close_high, config.release_early, config.action_noise)
    workers = config.num_workers or available_cores()
    size, cameras = policy.image_size, get_args(Camera)[: policy.num_images]
    return generate_demos(config.suites, config.episodes_per_task, seed, flaws, size, cameras, workers)


def imitate(
    policy: OpenVLAPolicy,
    batches: DemoBatches,
    config: FinetuneConfig,
    on_log: Callable[[int, dict[str, float]], None],
) -> tuple[float, float]:
    """Bring the policy to what was demonstrated; returns the first and the last logged loss."""
    optim = config.optim
    optimizer = build_adamw(policy.parameters(), optim.lr, optim.weight_decay, BETAS)
    generator = torch.Generator().manual_seed(config.run.seed)
    logged: list[float] = []
    loss_sum = torch.zeros((), device=policy.device)
    policy.train()
    started = time.monotonic()
    for step in range(1, optim.steps + 1):
        set_lr(optimizer, optim.lr * warmup_cosine(step, optim.steps, optim.warmup_steps))
        loss = imitation_loss(policy, batches.draw(optim.batch_size, generator), optim)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), optim.max_grad_norm)
        optimizer.step()
        loss_sum += loss.detach()
        if step % optim.log_interval == 0 or step == optim.steps:
            since = (step - 1) % optim.log_interval + 1
            logged.append(float(loss_sum) / since)
            loss_sum.zero_()
            if not np.isfinite(logged[-1]):
                raise VlarlError(f"the loss is {logged[-1]} at step {step}; lower optim.lr (now {optim.lr})")
            speed = step * optim.batch_size / (time.monotonic() - started)
            row = {"train/loss": logged[-1], "train/grad_norm": float(norm), "perf/train_samples_per_s": speed}
            on_log(step, row | {"train/lr": optimizer.param_groups[0]["lr"]})
    return logged[0], logged[-1]


def imitation_loss(policy: OpenVLAPolicy, batch: Demonstrated, optim: FinetuneOptimConfig) -> torch.Tensor:
    """Mean cross-entropy over the action ids, the support that rollout samples from; or the regression head's error."""
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
        if policy.acts_by_regression:
            return F.l1_loss(policy.regress(batch.inputs), batch.actions.to(policy.heads_device))
        logits = policy.score(batch.inputs, batch.token_ids).logits
    return F.cross_entropy(logits.float().flatten(0, 1), (batch.token_ids - policy.codec.first_id).flatten())
