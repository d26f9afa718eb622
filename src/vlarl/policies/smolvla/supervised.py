"""SmolVLA on demonstrations: flow matching, the squared error of the velocity between noise and actions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from vlarl.decisions import Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies.smolvla.conventions import signed_statistics, to_signed
from vlarl.policies.smolvla.inputs import SmolVLAInputs, chain_of
from vlarl.policies.smolvla.statistics import NEEDED, Scaling, Scalings
from vlarl.policies.supervised import ImitationErrors
from vlarl.types import FloatArray

if TYPE_CHECKING:
    from vlarl.policies.smolvla.policy import SmolVLAPolicy

log = logging.getLogger(__name__)

BETA = 1.5  # times are distributed as Beta(1.5, 1), which favours those near the noise
TIME_RANGE = 0.001, 0.999  # the smallest time, and how far the others reach beyond it


@dataclass(frozen=True)
class DemoRows(TensorRows):
    """Demonstrated chunks without their images."""

    tokens: torch.Tensor  # [N, T] int64
    token_mask: torch.Tensor  # [N, T] bool
    state: torch.Tensor  # [N, S] float32, normalised and padded
    actions: torch.Tensor  # [N, C, M] float32, normalised and padded
    noise: torch.Tensor | None = None  # [N, C, M] float32, normal; None before `with_noise`
    uniforms: torch.Tensor | None = None  # [N] float32 in [0, 1), of which the times are made


def demo_rows(policy: SmolVLAPolicy, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> DemoRows:
    """Instructions, states and whole chunks of actions, normalised by the statistics in use."""
    tokens, mask = policy.processor.instructions(instructions)
    if policy.flips_gripper:
        actions = np.concatenate([actions[..., :-1], to_signed(actions[..., -1:])], axis=-1)
    targets = policy.processor.scalings.action.normalize(torch.from_numpy(actions).float())
    padded = F.pad(targets, (0, policy.config.max_action_dim - policy.action_dim))
    return DemoRows(tokens, mask, policy.processor.states(proprio), padded)


def with_noise(rows: TensorRows, seed: int, samples: Sequence[int]) -> DemoRows:
    """The rows with noise and times, each sample's from a generator of its own."""
    assert isinstance(rows, DemoRows), "these are demonstrations for another policy"
    generators = [np.random.Generator(np.random.Philox(key=np.array([seed, sample], np.uint64))) for sample in samples]
    uniforms = np.array([generator.random(dtype=np.float32) for generator in generators])
    noise = np.stack([g.standard_normal(rows.actions.shape[1:], dtype=np.float32) for g in generators])
    device = rows.actions.device
    return replace(rows, noise=torch.from_numpy(noise).to(device), uniforms=torch.from_numpy(uniforms).to(device))


def supervised_loss(policy: SmolVLAPolicy, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
    """The mean over a batch, at the times and from the noise of its samples."""
    assert isinstance(rows, DemoRows) and rows.noise is not None and rows.uniforms is not None, "with_noise comes first"
    low, length = TIME_RANGE
    times = (rows.uniforms ** (1 / BETA) * length + low).to(policy.device)
    inputs = SmolVLAInputs(rows.tokens, rows.token_mask, frames.permute(0, 1, 4, 2, 3), rows.state)
    return matching_losses(policy, inputs, rows.actions.to(policy.device), rows.noise.to(policy.device), times).mean()


def imitation_errors(policy: SmolVLAPolicy, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
    """Of the denoised actions; the noise of a row follows from its place in the batch."""
    assert isinstance(rows, DemoRows), "these are demonstrations for another policy"
    greedy = Sampling(temperature=0.0)
    inputs = SmolVLAInputs(rows.tokens, rows.token_mask, frames.permute(0, 1, 4, 2, 3), rows.state)
    chain = chain_of(policy.sample(inputs, policy.noise(range(len(rows)), greedy), greedy))
    wanted = rows.actions[:, : policy.num_steps, : policy.action_dim].cpu()
    return ImitationErrors((chain.actions.float().cpu() - wanted).abs().mean(dim=(1, 2)), None)


def matching_losses(
    policy: SmolVLAPolicy, inputs: SmolVLAInputs, actions: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
) -> torch.Tensor:
    """[B] the mean squared error of the velocity, over all actions and dimensions, padded ones as well.

    Actions and noise are [B, C, M], times are [B].
    """
    weight = times.view(-1, 1, 1)
    states = policy.model.expert_states(policy.prefix(inputs), weight * noise + (1 - weight) * actions, times)
    with torch.autocast(states.device.type, enabled=False):
        velocity = policy.model.velocity(states.float())
        return (velocity - (noise - actions)).square().mean(dim=(1, 2))


def add_statistics(
    policy: SmolVLAPolicy, statistics: Mapping[str, Mapping[str, Any]], pooled: Callable[[], Mapping[str, Any]]
) -> None:
    """Normalise by the statistics of demonstrations, pooled if they are of several datasets, unless the checkpoint has
    some that are known to be of these."""
    scalings, names = policy.processor.scalings, ", ".join(statistics)
    has_own = not scalings.problem(policy.config)
    if has_own and statistics.keys() <= set(policy.statistics_of):
        return
    columns = next(iter(statistics.values())) if len(statistics) == 1 else pooled()
    flips = policy.conventions.flips_gripper(tuple(statistics))
    action = signed_statistics(columns["action"]) if flips else columns["action"]
    found = Scalings(_filled(scalings.state, columns["proprio"]), _filled(scalings.action, action))
    if problem := found.problem(policy.config):
        if not has_own:
            raise UsageError(f"policy.path has no statistics, and those of the demonstrations don't fit: {problem}.")
        log.warning("the checkpoint's statistics are kept, because those of %s don't fit: %s", names, problem)
        return
    if not found.tensors():
        return
    if has_own:
        known = ", ".join(policy.statistics_of) or "data that the checkpoint does not name"
        before, now = _described(scalings.action), _described(found.action)
        log.warning(
            "the checkpoint's statistics are of %s: those of %s are used instead; of actions, before: %s; now: %s",
            *(known, names, before, now),
        )
    policy.use_scalings(found)
    policy.statistics_of = tuple(statistics)


def _described(scaling: Scaling) -> str:
    """`mean 0, 0.1; std 1, 0.5`."""
    listed = {name: ", ".join(f"{float(x):.3g}" for x in scaling.stats[name]) for name in NEEDED[scaling.mode]}
    return "; ".join(f"{name} {values}" for name, values in listed.items())


def _filled(scaling: Scaling, columns: Mapping[str, Any]) -> Scaling:
    known = {name: torch.tensor(columns[name], dtype=torch.float32) for name in NEEDED[scaling.mode] if name in columns}
    return replace(scaling, stats=known)
