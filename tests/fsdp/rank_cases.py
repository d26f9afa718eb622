"""Learners that are run by one process and by several ranks, and what is compared of them.

Every process builds a case from the same files and seeds, so that ranks are told nothing but their number.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from fakes.groups import flat

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.decisions import Decisions, Row, Sampling, TensorRows
from vlarl.loop import estimated_batch
from vlarl.policies.load import load_configured
from vlarl.policies.openvla.config import DecoderName, parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.checkpoint import CheckpointStore, policy_folder, restore
from vlarl.training.fsdp import Sharding, whole
from vlarl.training.learner import Learner
from vlarl.training.ranks import ProcessGroup, Ranks, SingleRank
from vlarl.training.state import TrainerState
from vlarl.types import Observation, Task, Trajectory, Transition

CPU = torch.device("cpu")
DEADLINE = timedelta(seconds=120)
INSTRUCTIONS = ("open the drawer", "put the zigzag bowl on the plate and close the drawer", "pick up the red cube")
LENGTHS = (2, 3, 1, 1)  # seven decisions: three microbatches, so that one of two ranks is idle once
LEARNING = {"lr": 1e-4, "microbatch_size": 3, "minibatches": 1}
UPDATES = 3


@dataclass(frozen=True)
class Case:
    """A learner, and how it is distributed over ranks."""

    decoder: str
    sections: dict[str, dict[str, Any]]
    sharding: Sharding = field(default_factory=lambda: Sharding("full"))
    broken: tuple[int, ...] = ()  # updates whose first advantage is infinite
    clipped: bool = False  # whether the clip has ended the gradient there: the loss is infinite, the gradient is not


@dataclass
class Outcome:
    """What an update, or a whole run, came to."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    steps: list[tuple[int, int, bool]] = field(default_factory=list)  # taken, skipped, stopped early
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # on rank 0
    num_local: int = 0  # values of the policy that this rank keeps
    seconds: float = 0.0


@dataclass(frozen=True)
class Drift:
    """How far two runs are apart: the largest difference of a metric (of its size, above 1), the largest of a weight,
    and the norm of those of all weights."""

    metrics: float
    weight: float
    norm: float

    def times(self, factor: float) -> Drift:
        return Drift(factor * self.metrics, factor * self.weight, factor * self.norm)

    def within(self, allowed: Drift) -> bool:
        return self.metrics <= allowed.metrics and self.weight <= allowed.weight and self.norm <= allowed.norm


def drift(found: Outcome, expected: Outcome) -> Drift:
    """Between two runs of the same updates."""
    gaps = [(found.weights[name] - weight).double().flatten() for name, weight in expected.weights.items()]
    assert list(found.weights) == list(expected.weights)
    gap = torch.cat(gaps).abs()
    return Drift(metric_gap(found.metrics, expected.metrics), float(gap.max()), float(gap.norm()))


def metric_gap(found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """The largest difference of a metric, of its size where that is above 1; what is not a number is so on both sides.

    How much is padding depends on how updates are cut into passes, which may differ.
    """
    assert len(found) == len(expected) > 0
    largest = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            assert math.isnan(value) == math.isnan(mine[name]), name
            if not math.isnan(value) and name != "packing_efficiency":
                largest = max(largest, abs(mine[name] - value) / max(1.0, abs(value)))
    return largest


def otherwise_rounded(case: Case) -> Case:
    """The same updates two decisions at a time, not three: the same sums, rounded otherwise."""
    optim = {**LEARNING, **case.sections.get("optim", {}), "microbatch_size": 2}
    if "microbatch_tokens" in optim:
        optim["microbatch_tokens"] *= 2
    return replace(case, sections={**case.sections, "optim": optim})


def small_policy(decoder: DecoderName) -> OpenVLAPolicy:
    """The built-in model with fewer and narrower layers; the autoregressive one reads actions off its embedding."""
    raw = dict(tiny_config(decoder, chunk_length=2 if decoder == "parallel" else 1).raw)
    raw["timm_model_kwargs"] = [{**tower, "embed_dim": 32, "depth": 2} for tower in raw["timm_model_kwargs"]]
    shape = {"hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 2}
    raw["text_config"] = {**raw["text_config"], **shape, "tie_word_embeddings": decoder == "autoregressive"}
    policy = OpenVLAPolicy(parse_config(raw), build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(3))
    return policy


def configured(case: Case, bases: Path) -> Config:
    """The case's configuration; its policy is one of the bases."""
    sections = {"optim": LEARNING, **case.sections}
    sections["policy"] = {"path": str(bases / case.decoder), **case.sections.get("policy", {})}
    return Config.model_validate(sections)


def build(case: Case, bases: Path, ranks: Ranks, checkpoint: Path | None = None) -> tuple[Learner, Config]:
    """A learner as `launch` builds one; one process has its weights to itself."""
    config = configured(case, bases)
    settings = config.policy
    source = settings.path if checkpoint is None else policy_folder(checkpoint) or settings.path
    sharding = Sharding() if isinstance(ranks, SingleRank) else case.sharding
    deferred = sharding.mode != "none"
    policy = load_configured(settings, source, CPU, settings.decoder, settings.actions, deferred)
    policy.prepare_training(settings, config.lora, config.run.seed)
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    return Learner(policy, algorithm, config, CPU, ranks, sharding, build_ptx(config, policy, ranks)), config


def experience(bases: Path, decoder: str) -> list[Trajectory]:
    """Two groups of two episodes that the base acted in, on made-up observations; one of each pair succeeds."""
    settings = Config.model_validate({"policy": {"path": str(bases / decoder)}}).policy
    policy = load_configured(settings, settings.path, CPU)
    engine, episodes = TorchEngine(policy, CPU), []
    for number, length in enumerate(LENGTHS):
        seen = [observation(10 * number + t, INSTRUCTIONS[(number + t) % 3]) for t in range(length + 1)]
        inputs, seeds = policy.process(seen[:-1]), [10 * number + t for t in range(length)]
        episodes.append(episode(policy, number, seen, inputs, engine.generate(inputs, Sampling(1.0), seeds)))
    return flat(episodes[:2], episodes[2:])


def observation(seed: int, instruction: str) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (1, 56, 56, 3), dtype=np.uint8)
    return Observation(images, rng.uniform(-1, 1, 8).astype(np.float32), instruction)


def episode(
    policy: OpenVLAPolicy, number: int, seen: Sequence[Observation], inputs: TensorRows, decisions: Decisions
) -> Trajectory:
    transitions = []
    for t in range(len(seen) - 1):
        rewards, executed = np.zeros(policy.num_steps, dtype=np.float32), policy.num_steps
        if t == len(seen) - 2 and number % 2:
            rewards[0], executed = 1.0, 1
        transitions.append(Transition(seen[t], Row(inputs, t), Row(decisions, t), rewards, executed))
    success = bool(number % 2)
    task = Task("tabletop_spatial", number % 3, 0, number, number // 2)
    return Trajectory(task, tuple(transitions), seen[-1], success, not success, success, 0)


def update(learner: Learner, gathered: Sequence[Trajectory], iteration: int, case: Case, outcome: Outcome) -> None:
    """What the loop does with an iteration's trajectories."""
    trajectories = learner.algorithm.with_learning_signal(gathered)
    parts: Any = SimpleNamespace(policy=learner.policy, algorithm=learner.algorithm, learner=learner)
    batch = estimated_batch(parts, learner.config, trajectories, iteration)
    if iteration in case.broken:
        assert batch.advantages is not None
        advantages = batch.advantages.clone()
        advantages[0] = math.inf
        batch = replace(batch, advantages=advantages)
    if iteration in case.broken and case.clipped:
        assert batch.old_logprobs is not None
        old_logprobs = batch.old_logprobs.clone()
        old_logprobs[0] -= 1.0
        batch = replace(batch, old_logprobs=old_logprobs)
    result = learner.update(batch, iteration, lambda done, planned: None)
    outcome.metrics.append(result.metrics)
    outcome.steps.append((result.num_optimizer_steps, result.num_skipped_steps, result.stopped_early))


def run(
    case: Case,
    bases: Path,
    ranks: Ranks,
    save_to: Path | None = None,
    resume: Path | None = None,
    groups: Sequence[Trajectory] | None = None,
) -> Outcome:
    """Three updates, with checkpoints after the first and the last; or the two that remain after the first."""
    groups, started = groups or experience(bases, case.decoder), time.perf_counter()
    learner, _ = build(case, bases, ranks, resume)
    outcome, done = Outcome(), 0
    if resume is not None:
        done = restore(learner, resume).iteration
    store = None if save_to is None else CheckpointStore(save_to, 2, ranks)
    for iteration in range(done + 1, UPDATES + 1):
        update(learner, groups, iteration, case, outcome)
        if store is not None and iteration in (1, UPDATES):
            name = "step_000001" if iteration == 1 else "final"
            store.save(name, learner, TrainerState(iteration=iteration))
    outcome.seconds = time.perf_counter() - started
    outcome.weights = {name: whole(weight.detach()).clone() for name, weight in learner.policy.named_parameters()}
    parts = (getattr(p, "_local_tensor", p) for p in learner.policy.parameters())
    outcome.num_local = sum(part.numel() for part in parts)
    return outcome


Work = Callable[[Ranks, Path], Any]


def in_ranks(world_size: int, work: Work, folder: Path) -> list[Any]:
    """What `work(ranks, folder)` returns on each of so many ranks; it must be picklable by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(_be_rank, (world_size, port, work, folder), nprocs=world_size)
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _be_rank(rank: int, world_size: int, port: int, work: Work, folder: Path) -> None:
    faulthandler.enable()  # a rank that gloo aborts says where it was
    torch.set_num_threads(1)
    ranks = ProcessGroup.join(rank, world_size, "127.0.0.1", port, CPU, DEADLINE)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(work(ranks, folder)))
    ranks.any(False)  # a rank that leaves while another still works can end that one: gloo aborts the process
    # Not by the interpreter's own end: gloo's threads may still release tensors, for which Python is gone by then, and
    # abort the process (pytorch issue 190489).
    os._exit(0)
