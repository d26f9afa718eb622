"""Passes of the torch engine for which memory is too small, and recordings that make way: with a recorder that needs no
GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fakes.small_gpu import SmallGpu

from vlarl.decisions import Sampling
from vlarl.errors import VlarlError
from vlarl.policies.tiny import init_tiny
from vlarl.recording import Recorder
from vlarl.rollout.engines.cuda_graphs import Recordings
from vlarl.rollout.engines.torch import PassCounts, TorchEngine

CPU = torch.device("cpu")
SEEDS = list(range(40, 49))


class CpuRecorder(Recorder):
    """Repeats the work itself, into the tensors of its first result; counts what a GPU would do."""

    def __init__(self):
        super().__init__()
        self.pools = 1
        self.recorded: list[tuple[int, int]] = []  # pool and rows
        self.replayed = 0

    def renew(self):
        self.pools += 1

    def warm(self, work):
        return work()

    def capture(self, work):
        decisions = work().map(torch.clone)
        self.recorded.append((self.pools, len(decisions)))

        def replay():
            self.replayed += 1
            found = iter(work().tensors())
            decisions.map(lambda own: own.copy_(next(found)))

        return SimpleNamespace(replay=replay), decisions

    def replaying(self):
        return nullcontext()


@pytest.fixture
def policy():
    return init_tiny("parallel", seed=1)


@pytest.fixture
def inputs(policy, observation):
    return policy.process([observation(i) for i in range(9)])


def recording(policy, exclusive=False):
    engine, recorder = TorchEngine(policy, CPU), CpuRecorder()
    recorder.scarce = exclusive
    engine._recordings = Recordings(recorder)
    return engine, recorder


def test_a_batch_that_is_too_large_is_generated_in_halves_with_the_same_seeds(policy, inputs, caplog):
    expected = TorchEngine(policy, CPU, batch_size=2).generate(inputs, Sampling(1.0), SEEDS)
    engine, gpu = TorchEngine(policy, CPU), SmallGpu(policy, 3, "sample")
    found = engine.generate(inputs, Sampling(1.0), SEEDS)
    assert gpu.passes == [9, 8, 4, 2, 2, 2, 2, 1], "powers of two, to which recorded passes are padded"
    assert torch.equal(found.sample.ids, expected.sample.ids)
    assert torch.equal(found.engine_logprobs, expected.engine_logprobs)
    assert engine.counts == PassCounts(oom_retries=3)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and said[0].startswith(
        "the rollout ran out of memory with passes of 9 decisions; from here on 8. CUDA out of memory. Tried"
    )
    gpu.passes.clear()
    engine.generate(inputs, Sampling(1.0), SEEDS)
    assert gpu.passes == [2, 2, 2, 2, 1] and engine.counts.oom_retries == 3, "it is remembered"


def test_what_went_well_before_memory_ran_out_is_kept(policy, inputs):
    expected = TorchEngine(policy, CPU, batch_size=4).generate(inputs, Sampling(1.0), SEEDS)
    engine, gpu = TorchEngine(policy, CPU, batch_size=4), SmallGpu(policy, 3, "sample", spared=1)
    found = engine.generate(inputs, Sampling(1.0), SEEDS)
    assert gpu.passes == [4, 4, 2, 2, 1]
    assert torch.equal(found.sample.ids, expected.sample.ids)


def test_a_single_decision_that_does_not_fit_ends_the_run_with_remedies(policy, inputs):
    engine, gpu = TorchEngine(policy, CPU), SmallGpu(policy, 0, "sample")
    with pytest.raises(VlarlError, match=r"the decision for a single observation ran out of memory: CUDA.*quantize 4"):
        engine.generate(inputs, Sampling(1.0), SEEDS)
    assert gpu.passes == [9, 8, 4, 2, 1]


def test_other_errors_are_raised_as_they_are(policy, inputs):
    def broken(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    policy.sample = broken
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), SEEDS)


def test_an_error_of_a_recording_that_followed_lack_of_memory_counts_as_that(policy, inputs):
    """CUDA says that a capture failed, while an exception about memory is on its way."""
    engine, recorder = recording(policy)
    plain, record = TorchEngine(policy, CPU, batch_size=4).generate(inputs, Sampling(1.0), SEEDS), recorder.capture

    def failing(work):
        if len(decisions := work()) <= 4:
            return record(work)
        try:
            raise torch.OutOfMemoryError(f"no memory for {len(decisions)}")
        finally:
            raise RuntimeError("the capture failed")

    recorder.capture = failing
    for _ in range(3):
        assert torch.equal(engine.generate(inputs, Sampling(1.0), SEEDS).sample.ids, plain.sample.ids)
    assert engine.batch_size == 4 and engine.counts.oom_retries == 2


def test_recorded_passes_give_the_decisions_of_plain_ones(policy, inputs):
    engine, recorder = recording(policy)
    for number in range(4):
        seeds = [number * 10 + seed for seed in SEEDS]
        expected = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), seeds)
        assert torch.equal(engine.generate(inputs, Sampling(1.0), seeds).sample.ids, expected.sample.ids)
    assert recorder.recorded == [(1, 16)] and recorder.replayed == 3


def test_released_recordings_are_made_again_in_a_fresh_pool_when_they_are_needed(policy, inputs):
    engine, recorder = recording(policy)
    for _ in range(2):
        engine.generate(inputs, Sampling(1.0), SEEDS)
    before = engine.counts
    assert engine.release_recordings() and not engine.release_recordings(), "there are none any more"
    expected = TorchEngine(policy, CPU).generate(inputs, Sampling(1.0), SEEDS)
    assert torch.equal(engine.generate(inputs, Sampling(1.0), SEEDS).sample.ids, expected.sample.ids)
    assert recorder.recorded == [(1, 16), (2, 16)], "at once: the kernels are warm"
    spent = engine.counts.since(before)
    assert list(spent) == ["time/recording"] and spent["time/recording"] > 0
    assert engine.counts.since(engine.counts) == {}


@pytest.mark.parametrize(("exclusive", "left"), [(False, 2), (True, 1)])
def test_where_memory_is_scarce_recordings_make_way_for_the_first_pass_of_another_shape(
    policy, inputs, exclusive, left
):
    engine, recorder = recording(policy, exclusive)
    few = inputs.rows(torch.arange(2))
    for _ in range(2):
        engine.generate(inputs, Sampling(1.0), SEEDS)
    for _ in range(2):
        engine.generate(few, Sampling(1.0), SEEDS[:2])
    assert len(engine._recordings) == left
    engine.generate(inputs, Sampling(1.0), SEEDS)
    assert len(engine._recordings) == 2 and recorder.pools == (2 if exclusive else 1)


def test_recordings_make_way_before_passes_become_smaller(policy, inputs):
    engine, recorder = recording(policy)
    for _ in range(2):
        engine.generate(inputs.rows(torch.arange(4)), Sampling(1.0), SEEDS[:4])
    sample, failures = policy.sample, []

    def full(batch, noise, sampling):
        if len(batch) == 16 and len(engine._recordings):
            failures.append(len(batch))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(batch, noise, sampling)

    policy.sample = full
    engine.generate(inputs, Sampling(1.0), SEEDS)
    assert failures == [16] and engine.batch_size is None and engine.counts.oom_retries == 1


def test_all_that_keep_recordings_drop_them(policy, inputs):
    """The pool is the same for rollouts and updates: one recording that is left would keep all of it."""
    engine, recorder = recording(policy)
    other = TorchEngine(policy, CPU)
    other._recordings = Recordings(recorder)
    for each in (engine, other, engine, other):
        each.generate(inputs, Sampling(1.0), SEEDS)
    assert len(engine._recordings) == len(other._recordings) == 1
    assert other.release_recordings() and recorder.pools == 2
    assert len(engine._recordings) == len(other._recordings) == 0
