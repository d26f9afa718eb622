"""Stochastic denoising: how a flow-matching policy gets log-probs.

A flow policy integrates a velocity field from noise (time 1) to actions (time 0) in K Euler steps. That chain is
deterministic and has no likelihood. For RL one step of it is made stochastic: a Gaussian whose mean and std are known,
whose sample is kept, and whose log-prob is computed again by the learner. All other steps follow the ODE, and so does
evaluation (temperature 0).

    sde     Flow-SDE (Flow-GRPO, pi_RL): the SDE with the same marginals as the ODE; std a sqrt(t / (1 - t)) sqrt(d)
    cps     Flow-CPS: part of the predicted noise is replaced by fresh noise, so that its level stays the schedule's
    noise   Flow-Noise (ReinFlow): the ODE's step as the mean, and a learned std between two bounds

Everything here is computed in float32 or better: bfloat16 loses the small differences that log-probs consist of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from vlarl.decisions import TensorRows

FlowKind = Literal["sde", "cps", "noise"]

Field = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Velocities of a state [B, C, M] at times [B], and the learned std, both [B, C, M]; None without a learned std."""


@dataclass(frozen=True)
class Denoising:
    """How actions are denoised, and which noise one of the steps adds."""

    num_steps: int  # K
    kind: FlowKind = "sde"
    level: float = 0.5  # a, of sde and cps
    min_std: float = 0.08  # of noise
    max_std: float = 0.16
    step: int | None = None  # the stochastic one; None: each decision has a random one

    def __post_init__(self) -> None:
        if self.num_choices < 1:
            raise ValueError(f"Flow-CPS with {self.num_steps} denoising step: its last step has no noise; take 2 steps")
        if self.step is not None and not 0 <= self.step < self.num_choices:
            raise ValueError(
                f"the stochastic step {self.step} is not one of the steps that can be: 0 to {self.num_choices - 1} of "
                f"{self.num_steps} with {self.kind}"
            )

    @property
    def num_choices(self) -> int:
        """How many of the first steps can be stochastic: all of them, but for the last step of Flow-CPS."""
        return self.num_steps - 1 if self.kind == "cps" else self.num_steps

    def chosen(self, uniforms: torch.Tensor) -> torch.Tensor:
        """[B] int64 the stochastic step of each decision, by a uniform in [0, 1) each."""
        if self.step is not None:
            return torch.full(uniforms.shape, self.step, dtype=torch.int64, device=uniforms.device)
        return (uniforms * self.num_choices).long().clamp_max(self.num_choices - 1)

    def times(self, index: torch.Tensor) -> torch.Tensor:
        """[B] float32 the time at which a step [B] begins; the same grid for sampling and scoring."""
        return _grid(self.num_steps, index.device)[index]

    def gaussian(
        self, x: torch.Tensor, velocity: torch.Tensor, index: torch.Tensor, learned: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and std of the state after the stochastic step [B] from `x`; the std broadcasts over [B, C, M]."""
        time, to_action, to_noise, std = _coefficients(self, x.device, x.dtype)[index].unbind(-1)
        time, to_action, to_noise, std = (c.view(-1, *[1] * (x.dim() - 1)) for c in (time, to_action, to_noise, std))
        action, noise = x - time * velocity, x + (1 - time) * velocity  # that a straight path would begin and end at
        mean = action * to_action + noise * to_noise
        if self.kind == "noise":
            assert learned is not None, "Flow-Noise needs a learned std"
            return mean, learned
        return mean, std


@dataclass(frozen=True)
class ChainSample(TensorRows):
    """A denoised decision: its stochastic step, and where the chain ended."""

    before: torch.Tensor  # [B, C, M] float32 the state before the stochastic step
    after: torch.Tensor  # [B, C, M] float32 the state after it
    index: torch.Tensor  # [B] int64 which step of the chain it is
    actions: torch.Tensor  # [B, K, D] float32 normalised, of the executed steps and real dimensions


@dataclass(frozen=True)
class Chain:
    """A denoised batch. All states are [B, C, M]; mean and std are those of the stochastic step, and broadcast."""

    before: torch.Tensor
    after: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor  # at temperature 1
    end: torch.Tensor


def denoise(
    field: Field,
    start: torch.Tensor,
    noise: torch.Tensor,
    index: torch.Tensor,
    denoising: Denoising,
    temperature: float,
) -> Chain:
    """Integrate from `start` [B, C, M]; `index` [B] is the stochastic step of each row.

    `noise` [B, C, M] is what that step adds, in units of its std times the temperature; at temperature 0 all steps are
    the ODE's.
    """
    x = before = after = mean = start
    std = torch.ones_like(start)
    for k in range(denoising.num_steps):
        at = torch.full_like(index, k)
        velocity, learned = field(x, denoising.times(at))
        moved = x - velocity / denoising.num_steps
        here = (index == k).view(-1, *[1] * (x.dim() - 1))
        own_mean, own_std = denoising.gaussian(x, velocity, at, learned)
        if temperature != 0:
            moved = torch.where(here, own_mean + temperature * own_std * noise, moved)
        before, after = torch.where(here, x, before), torch.where(here, moved, after)
        mean, std = torch.where(here, own_mean, mean), torch.where(here, own_std, std)
        x = moved
    return Chain(before, after, mean, std, x)


def gaussian_logprobs(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Log-density of each element, without a gradient through `x`."""
    std = std.expand_as(mean)
    return -0.5 * ((x.detach() - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(std: torch.Tensor) -> torch.Tensor:
    """Entropy of each element in nats."""
    return std.log() + 0.5 * math.log(2 * math.pi * math.e)


class NoiseHead(nn.Module):
    """The learned std of Flow-Noise, from the states that velocities are read from. It lies between two bounds, on a
    logarithmic scale, so that it can neither vanish nor grow without limit."""

    def __init__(self, hidden_size: int, dimensions: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_size, dimensions)
        nn.init.zeros_(self.out.weight)  # at first the middle of the bounds everywhere
        nn.init.zeros_(self.out.bias)

    def forward(self, states: torch.Tensor, min_std: float, max_std: float) -> torch.Tensor:
        """[B, C, H] -> [B, C, M]."""
        low, high = math.log(min_std), math.log(max_std)
        std: torch.Tensor = (low + (high - low) * torch.sigmoid(self.out(states))).exp()
        return std


@lru_cache(maxsize=64)
def _grid(num_steps: int, device: torch.device) -> torch.Tensor:
    """[K] float32 when each step begins: from 1 downwards in steps of 1/K."""
    return torch.tensor([1.0 - k * (1.0 / num_steps) for k in range(num_steps)], dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _coefficients(denoising: Denoising, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[K, 4] for each step: its time, the weights of action and noise in the mean, and the std (0 where learned)."""
    rows = []
    d = 1.0 / denoising.num_steps
    for k in range(denoising.num_steps):
        time = 1.0 - k * d
        following = time - d
        if denoising.kind == "sde":
            odds = time / (1.0 - (following if k == 0 else time))  # at time 1 the ODE's would be infinite
            variance = denoising.level**2 * odds
            rows.append((time, 1 - following, following - variance * d / (2 * time), math.sqrt(variance * d)))
        elif denoising.kind == "cps":
            angle = denoising.level * math.pi / 2
            rows.append((time, 1 - following, following * math.cos(angle), following * math.sin(angle)))
        else:
            rows.append((time, 1 - following, following, 0.0))
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)
