"""How far a float32 answer may be from the truth: float64 decides, on the same input; no bound comes from one CPU.

Two float32 programs that mean the same (an engine and the learner, a batch and its rows, two attention kernels) differ
by rounding, and the rounding depends on the kernels of the CPU. So they are not compared with each other:

    exact   the reference's answer in float64
    plain   the reference's answer in float32: its error against `exact` is what float32 costs on this input
    found   the answer under test: its error against `exact` may be FACTOR times that of `plain`, both in the worst
            element and in the root mean square

Two limits keep this honest. A few roundings of the largest number are always allowed, since the error of `plain` may be
zero by accident where there are few elements. And an error of `plain` of more than CEILING roundings is refused: it is
not rounding, and nothing may be derived from it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy

Module = TypeVar("Module", bound=nn.Module)
Result = TypeVar("Result")

EPS = torch.finfo(torch.float32).eps
FACTOR = 4.0
LOGPROB_FACTOR = 2.0  # of the errors over the whole support, see `logprob_judge`; engines were seen to need 0.7 at most
WORST_FLOOR, RMS_FLOOR = 4.0, 1.0  # roundings of the largest number that are always allowed
CEILING = 256.0  # roundings that a float32 pass may be wrong by; bfloat16 is wrong by 65536 in one


@contextmanager
def in_float64() -> Iterator[None]:
    """`tensor.float()`, `torch.float` and new tensors are float64 in here, so that code that computes in float32 loses
    nothing.

    Sample random numbers before: those of float64 are others.
    """
    single, default, named = torch.Tensor.float, torch.get_default_dtype(), torch.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.float = torch.float64  # as some versions of transformers name it
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.Tensor.float = single  # type: ignore[method-assign]
        torch.float = named
        torch.set_default_dtype(default)


def exactly(module: Module, compute: Callable[[Module], Result]) -> Result:
    """What `compute` makes of a copy of the module in float64."""
    with in_float64():
        return compute(copy.deepcopy(module).double())


@dataclass(frozen=True)
class FloatJudge:
    """The exact answer, and the errors that float32 itself makes on the way to it."""

    exact: torch.Tensor  # float64
    worst: float
    rms: float
    scale: float  # the largest number that the answer is made of

    @classmethod
    def of(cls, exact: torch.Tensor, plain: torch.Tensor, scale: float | None = None) -> FloatJudge:
        """From the reference's answers in float64 and float32; `scale` where parts of the answer cancel out."""
        assert exact.dtype == torch.float64, "the judge was not computed in float64"
        exact = exact.detach()
        scale = float(exact.abs().max()) if scale is None else scale
        judge = cls(exact, *_errors(plain, exact), scale)
        assert judge.worst <= CEILING * EPS * scale, f"an error of {judge.worst:.1e} on {scale:.1e} is not rounding"
        return judge

    def problem(self, found: torch.Tensor, factor: float = FACTOR) -> str:
        """What is wrong with an answer, or nothing."""
        worst, rms = _errors(found, self.exact)
        allowed = max(factor * self.worst, WORST_FLOOR * EPS * self.scale)
        allowed_rms = max(factor * self.rms, RMS_FLOOR * EPS * self.scale) if found.numel() > 1 else allowed
        if worst <= allowed and rms <= allowed_rms:
            return ""
        return (
            f"errors against float64: worst {worst:.2e} of {allowed:.2e} allowed, rms {rms:.2e} of {allowed_rms:.2e} "
            f"allowed; float32's own: worst {self.worst:.2e}, rms {self.rms:.2e}, on numbers up to {self.scale:.2e}"
        )

    def apart(self, factor: float = FACTOR) -> float:
        """The most that two such answers may differ by."""
        return 2 * max(factor * self.worst, WORST_FLOOR * EPS * self.scale)

    def check(self, found: torch.Tensor, factor: float = FACTOR) -> None:
        """The answer is as right as float32 can be."""
        problem = self.problem(found, factor)
        assert not problem, problem


@torch.no_grad()
def value_judge(policy: OpenVLAPolicy, inputs: OpenVLAInputs) -> FloatJudge:
    """The critic's values [B, V]. They are few, so float32's own error is that of the numbers that they are sums of."""

    def summed(valuing: OpenVLAPolicy) -> tuple[torch.Tensor, torch.Tensor]:
        assert valuing.value_head is not None
        terms: list[torch.Tensor] = []
        hook = valuing.value_head.out.register_forward_pre_hook(lambda _, given: terms.append(given[0]))
        values = valuing.values(inputs)
        hook.remove()
        return values, terms[0]

    (exact, exact_terms), (_, terms) = exactly(policy, summed), summed(policy)
    assert policy.value_head is not None
    weight = float(policy.value_head.out.weight.norm(dim=1).max())
    error, scale = (weight * float(t.norm(dim=1).max()) for t in (terms.double() - exact_terms, exact_terms))
    assert error <= CEILING * EPS * scale, f"an error of {error:.1e} on {scale:.1e} is not rounding"
    return FloatJudge(exact, error, error, max(weight, float(exact.abs().max())))


def logit_judge(policy: OpenVLAPolicy, inputs: OpenVLAInputs, ids: torch.Tensor) -> FloatJudge:
    """The learner's logits [B, T, N] given tokens."""
    with torch.no_grad():
        return FloatJudge.of(exactly(policy, lambda p: p.score(inputs, ids).logits), policy.score(inputs, ids).logits)


def check_gradients(
    found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]
) -> None:
    """Gradients by name, each judged by itself; roundings are those of the largest gradient, as all come from one loss."""
    assert found.keys() == exact.keys() == plain.keys()
    scale = max(float(gradient.abs().max()) for gradient in exact.values())
    for name, gradient in found.items():
        problem = FloatJudge.of(exact[name], plain[name], scale).problem(gradient)
        assert not problem, f"{name}: {problem}"


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that a backward pass has left in a module."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_logprobs(
    found: torch.Tensor, policy: OpenVLAPolicy, inputs: OpenVLAInputs, ids: torch.Tensor, temperature: float
) -> None:
    """An engine's log-probs [B, T] of tokens are those of the learner's policy."""
    logprob_judge(policy, inputs, ids, temperature).check(found, LOGPROB_FACTOR)


@torch.no_grad()
def logprob_judge(policy: OpenVLAPolicy, inputs: OpenVLAInputs, ids: torch.Tensor, temperature: float) -> FloatJudge:
    """The log-probs [B, T] of tokens under a policy. Float32's own errors are those of the learner's pass over the whole
    support: 256 times as many as tokens, since the errors of a few tokens may be small by accident."""

    def logprobs(scoring: OpenVLAPolicy) -> torch.Tensor:
        return (scoring.score(inputs, ids).logits / (temperature or 1.0)).log_softmax(-1)

    exact = exactly(policy, logprobs)
    places = (ids - policy.codec.first_id).unsqueeze(-1)
    return replace(FloatJudge.of(exact, logprobs(policy)), exact=exact.gather(-1, places).squeeze(-1))


def _errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The largest and the root mean square."""
    assert found.shape == exact.shape, f"{tuple(found.shape)} for {tuple(exact.shape)}"
    error = (found.detach().double() - exact).abs()
    assert error.isfinite().all(), "not finite"
    return float(error.max()), float(error.square().mean().sqrt())
