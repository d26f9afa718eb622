"""`vlarl bench update`: one optimizer step of GRPO on a batch of decisions, through the learner.

    vlarl:  adapters on every linear layer, also of the vision towers; with --no-adapters all weights
    peer:   peft's adapters on transformers' language model alone, layers recomputed, AdamW; images are only embedded

The peer trains less and so has less to do. Agreement is the largest difference of the log-probs of the same tokens
before the first step, when adapters change nothing yet: both evaluate the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vlarl.algorithms import build_algorithm
from vlarl.bench.request import Bench, BenchRequest
from vlarl.bench.results import Report, Row
from vlarl.bench.rollout import NUM_INPUTS
from vlarl.bench.timing import Timing, release, timed
from vlarl.decisions import TrainBatch
from vlarl.errors import VlarlError
from vlarl.policies.base import Policy
from vlarl.policies.bench_model import BenchModel, PeerTrainer
from vlarl.training.learner import Learner

LEAST_ROWS = 8  # of a step: a smaller microbatch is one of several
WARMUPS = 4  # the optimizer's state is allocated, kernels are loaded, the pass is recorded and replayed once


def bench_update(request: BenchRequest, microbatches: Sequence[int]) -> Report:
    """Measure steps with microbatches of these sizes."""
    bench = Bench(request)
    policy = bench.load()
    has_adapters = request.adapters is not False
    settings = bench.settings(policy, microbatch=list(microbatches))
    peers: dict[int, Timing] = {}
    theirs = None
    if request.peers and has_adapters:
        trainer = policy.bench_model().peer().trainer(request.rank)
        batch = random_batch(policy.bench_model(), 2, seed=NUM_INPUTS)
        theirs = trainer.logprobs(batch.inputs, batch.decisions)
        for size in microbatches:
            peers |= _peer_timing(bench, policy.bench_model(), trainer, size)
        del trainer
        release(bench.device)
    bench.adapt(policy, adapters=has_adapters)
    difference = None if theirs is None else logprob_difference(policy, theirs)
    found = []
    for size in microbatches:
        row = bench.attempt(_name(size), max(size, LEAST_ROWS), lambda s=size: _measure(bench, policy, s))  # type: ignore[misc]
        if size in peers:
            agreement = f"{difference:.1e}"
            facts = (row.facts or {}) | {"logprob_difference": difference}
            row = replace(row, peer=peers[size], peer_name="peft", agreement=agreement, facts=facts)
        found.append(row)
        release(bench.device)
    return Report("update", settings, bench.rates, found, _notes(has_adapters, bool(peers)))


def _notes(has_adapters: bool, has_peers: bool) -> list[str]:
    trained = "Adapters on every linear layer" if has_adapters else "All weights"
    notes = [f"{trained}, layers recomputed, one step of AdamW on at least {LEAST_ROWS} decisions."]
    if has_peers:
        notes.append("The peer has adapters on the language model alone. Agreement: largest difference of a log-prob.")
    return notes


def _name(size: int) -> str:
    return f"update, microbatch {size}"


def make_learner(bench: Bench, policy: Policy, microbatch_size: int) -> Learner:
    """A learner that takes one step of GRPO on each batch."""
    config = bench.learner_config(microbatch_size)
    return Learner(policy, build_algorithm(config.algorithm, 1.0), config, bench.device)


def random_batch(model: BenchModel, rows: int, seed: int) -> TrainBatch:
    """Random decisions, with random advantages."""
    decisions = model.decisions(rows, seed)
    advantages = torch.randn(decisions.mask.shape, generator=torch.Generator().manual_seed(seed))
    return TrainBatch(
        inputs=model.inputs(rows, seed),
        decisions=decisions,
        trajectory=torch.arange(rows),
        old_logprobs=decisions.engine_logprobs,
        advantages=advantages,
    )


@torch.no_grad()
def logprob_difference(policy: Policy, theirs: torch.Tensor) -> float:
    """The largest difference from the peer's log-probs."""
    batch = random_batch(policy.bench_model(), len(theirs), seed=NUM_INPUTS)
    device = theirs.device
    ours = policy.evaluate(batch.inputs.to(device), batch.decisions.to(device), 1.0).logprobs
    return float((ours.float() - theirs.float()).abs().max())


def _measure(bench: Bench, policy: Policy, size: int) -> Row:
    rows = max(size, LEAST_ROWS)
    model = policy.bench_model()
    batches = [random_batch(model, rows, seed) for seed in range(NUM_INPUTS)]
    learner = make_learner(bench, policy, size)

    def step(index: int) -> None:
        result = learner.update(batches[index % NUM_INPUTS], index + 1, lambda done, of: None)
        if result.num_skipped_steps:
            raise VlarlError("an update was not finite, so its timing means nothing: measure another checkpoint.")

    ours = timed(step, bench.request.repeats, WARMUPS, bench.device)
    rank = bench.request.rank if policy.has_adapter else None
    sizes = [min(size, rows - begin) for begin in range(0, rows, size)]
    floor = sum(bench.rates.floor(model.update_work(each, rank, True)) for each in sizes)
    return Row(_name(size), rows, ours, floor_s=floor)


def _peer_timing(bench: Bench, model: BenchModel, trainer: PeerTrainer, size: int) -> dict[int, Timing]:
    """The peer's steps on the same batches; none where its memory does not suffice."""
    rows = max(size, LEAST_ROWS)
    batches = [random_batch(model, rows, seed) for seed in range(NUM_INPUTS)]

    def step(index: int) -> None:
        batch = batches[index % NUM_INPUTS]
        trainer.update(batch.inputs, batch.decisions, size)

    try:
        return {size: timed(step, bench.request.repeats, WARMUPS, bench.device)}
    except torch.OutOfMemoryError:
        release(bench.device)
        return {}
