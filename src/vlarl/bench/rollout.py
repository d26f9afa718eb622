"""`vlarl bench rollout`: decisions through the engine, from observations on the host to what was sampled.

    rows of the table:   a batch of decisions, and the pass over images and prompt alone
    peer:                transformers' `generate` on the same weights and inputs, for a policy without adapters

Agreement is the fraction of greedy tokens that vlarl and the peer have in common, of those that follow the same tokens:
in the type that is measured, and in float32. bfloat16 rounds coarsely enough to change the likeliest of 256 tokens now
and then, in any two programs; the tokens in float32 show whether both compute the same function.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from vlarl.bench.request import Bench, BenchRequest
from vlarl.bench.results import Report, Row
from vlarl.bench.timing import Timing, release, timed
from vlarl.decisions import Sampling, TensorRows
from vlarl.errors import VlarlError
from vlarl.policies.base import Policy
from vlarl.policies.bench_model import BenchModel, Peer
from vlarl.rollout.engines.torch import TorchEngine

NUM_INPUTS = 3  # batches that the repeats take in turn
ENGINE_WARMUPS = 3  # a shape is recorded as a CUDA graph in the second call
COMPARED_ROWS = 8


def bench_rollout(request: BenchRequest, rows: Sequence[int]) -> Report:
    """Measure batches of so many decisions."""
    bench = Bench(request)
    policy = bench.load()
    model = policy.bench_model()
    settings = bench.settings(policy, rows=list(rows), decision=model.decision)
    found: list[Row] = []
    if request.adapters is not True:
        peer = model.peer() if request.peers else None
        exact = exact_agreement(policy) if request.peers else None
        for count in rows:
            found += measure_rows(bench, policy, model, count, None, peer, exact)
        del peer
    if request.adapters is not False:
        bench.adapt(policy)
        for count in rows:
            found += measure_rows(bench, policy, model, count, request.rank, None, None)
    notes = [
        "Temperature 1 with log-probs; the peer is greedy, without log-probs. The floor is that of reading all weights "
        "and multiplying, at the rates above."
    ]
    return Report("rollout", settings, bench.rates, found, notes)


def measure_rows(
    bench: Bench,
    policy: Policy,
    model: BenchModel,
    count: int,
    rank: int | None,
    peer: Peer | None,
    exact: float | None,
) -> list[Row]:
    """A batch of decisions; and its prefill alone, where that is a pass of its own."""
    given = [model.inputs(count, seed) for seed in range(NUM_INPUTS)]
    kind = f"batch {count}" + ("" if rank is None else f", adapters of rank {rank}")
    name = f"{model.decision}, {kind}"

    def decide() -> Row:
        engine = TorchEngine(policy, bench.device)
        sampling, seeds = Sampling(temperature=1.0), list(range(count))
        ours = timed(
            lambda index: engine.generate(given[index % NUM_INPUTS], sampling, seeds),
            bench.request.repeats,
            ENGINE_WARMUPS,
            bench.device,
        )
        theirs, facts = None, {}
        if peer is not None:
            greedy = model.tokens(engine.generate(given[0], Sampling(temperature=0.0), seeds))
            del engine
            release(bench.device)
            theirs = _timed_peer(bench, peer.generate, given)
            facts = {"equal_tokens": equal_tokens(greedy, peer.generate(given[0])), "equal_tokens_float32": exact}
        return _row(bench, name, count, (ours, theirs), model.generation_work(count, rank), peer, facts)

    def prefill() -> Row:
        ours = timed(
            lambda index: finite(model.prefill(given[index % NUM_INPUTS])), bench.request.repeats, 2, bench.device
        )
        theirs = None if peer is None else _timed_peer(bench, peer.prefill, given)
        work = model.prefill_work(count, rank)
        return _row(bench, f"prefill alone, {kind}", count, (ours, theirs), work, peer, {})

    release(bench.device)  # what was measured before must not be part of the peak
    found = [bench.attempt(name, count, decide)]
    release(bench.device)
    if model.prefill_work(count, rank) is not None:
        found.append(bench.attempt(f"prefill alone, {kind}", count, prefill))
    return found


def _row(
    bench: Bench,
    what: str,
    count: int,
    timings: tuple[Timing, Timing | None],
    work: Any,
    peer: Peer | None,
    facts: dict[str, Any],
) -> Row:
    ours, theirs = timings
    agreement = ""
    if facts:
        exact = facts["equal_tokens_float32"]
        agreement = f"{facts['equal_tokens']:.1%}" + ("" if exact is None else f" (float32 {exact:.1%})")
    name = "" if peer is None else peer.name
    return Row(what, count, ours, theirs, name, bench.rates.floor(work), agreement, facts)


def _timed_peer(bench: Bench, work: Any, given: Sequence[TensorRows]) -> Timing:
    return timed(lambda index: finite(work(given[index % NUM_INPUTS])), bench.request.repeats, 1, bench.device)


def finite(found: torch.Tensor) -> torch.Tensor:
    """The same values; an error where some of them are not finite, since their timing would mean nothing."""
    if not found.isfinite().all():
        raise VlarlError("what was computed is not finite, so its timing means nothing: measure another checkpoint.")
    return found


def equal_tokens(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The fraction of tokens [B, L] that are equal, of those before which all are."""
    same = (ours.cpu() == theirs.cpu()).int()
    compared = torch.cat([torch.ones_like(same[:, :1]), same.cumprod(dim=1)[:, :-1]], dim=1).bool()
    return float(same[compared].float().mean())


def exact_agreement(policy: Policy) -> float | None:
    """The fraction of greedy tokens that are equal in float32, of a few rows; None where the memory does not suffice
    for a copy."""
    device = next(policy.parameters()).device
    try:
        exact = policy if next(policy.parameters()).dtype == torch.float32 else copy.deepcopy(policy).float()
        model = exact.bench_model()
        inputs, seeds = model.inputs(COMPARED_ROWS, seed=NUM_INPUTS), list(range(COMPARED_ROWS))
        ours = TorchEngine(exact, device, cuda_graphs=False).generate(inputs, Sampling(temperature=0.0), seeds)
        return equal_tokens(model.tokens(ours), model.peer().generate(inputs))
    except torch.OutOfMemoryError:
        return None
    finally:
        release(device)
