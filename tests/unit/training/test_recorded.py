"""Recorded updates: what is copied, added and recorded when, with a recorder that replays by calling Python again; and
on a GPU the recordings themselves."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes.decisions import annotated_update, no_inputs

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import LoraConfig, ModelConfig, OptimConfig
from vlarl.decisions import Sampling, TrainBatch
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.tiny import init_tiny
from vlarl.recording import Recorder
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.fsdp import Sharding
from vlarl.training.learner import Learner
from vlarl.training.ranks import SingleRank
from vlarl.training.recorded import RecordedPasses, recorded_passes
from vlarl.training.update_metrics import PassSums

PPO = {"name": "ppo", "critic_hidden": (16,)}


class Played:
    """Calls the recorded work again and writes its sums where the recording's are, as a CUDA graph would."""

    def __init__(self, work: Callable, sums: object) -> None:
        self.work, self.sums, self.times = work, sums, 0

    def replay(self) -> None:
        self.times += 1
        self.sums.values.copy_(self.work().values)


class PlayedRecorder(Recorder):
    """Recording leaves gradients and values as they were; what is recorded reads the recording's own tensors."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.parameters, self.played, self.warmed = parameters, [], 0

    def warm(self, work):
        self.warmed += 1
        return work()

    def capture(self, work):
        kept = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        sums = work()
        sums = replace(sums, values=torch.full_like(sums.values, torch.nan))
        for parameter, before in zip(self.parameters, kept, strict=True):
            if before is not None:
                parameter.grad.copy_(before)
        self.played.append(Played(work, sums))
        return self.played[-1], sums

    @contextmanager
    def replaying(self) -> Iterator[None]:
        yield


def record(learner: Learner) -> PlayedRecorder:
    """Have the learner record its passes."""
    networks = learner._networks()
    recorder = PlayedRecorder([p for network in networks for p in network.parameters()])
    learner.recorded = RecordedPasses(learner._pass, networks, recorder)
    return recorder


CASES = {
    "grpo": {
        "algorithm": {"name": "grpo", "epochs": 3, "action_reconstruction_coef": 0.1},
        "kl": {"coef": 0.1, "target": 0.01, "horizon": 4},
    },
    "ppo": {"algorithm": PPO | {"epochs": 3, "value_init_steps": 1, "gae_level": "step"}},
    "ppo, separate": {"algorithm": PPO | {"epochs": 3}, "critic": {"kind": "separate"}},
}


def prompted_alike(batch: TrainBatch) -> TrainBatch:
    """The batch with its longest prompt in all rows: recorded passes pad others, and round otherwise then."""
    row = int(batch.inputs.lengths.argmax())
    alike = {name: getattr(batch.inputs, name)[row].expand(len(batch), -1) for name in ("input_ids", "attention_mask")}
    return replace(batch, inputs=replace(batch.inputs, **alike, known_ragged=None))


@pytest.mark.parametrize("case", CASES)
def test_recorded_updates_are_the_plain_ones_to_the_bit(act, learner_batch, configure, build, case):
    """Two updates of three epochs with two microbatches of one shape and a smaller one. The KL's coefficient and, with
    a critic, what is trained change in between."""
    policy = init_tiny("parallel", seed=3)
    config = configure(optim={"lr": 1e-3, "microbatch_size": 2, "weight_decay": 0.1}, **CASES[case])
    plain, recorded = (build(copy.deepcopy(policy), config) for _ in range(2))
    recorder = record(recorded)
    batch = prompted_alike(learner_batch(plain, act(policy, lengths=(2, 3))))
    for iteration in (1, 2):
        expected, found = (annotated_update(learner, batch, iteration) for learner in (plain, recorded))
        assert found.metrics == expected.metrics
        assert expected.metrics["ratio_first_minibatch_error"] == 0.0
        for (name, weight, _), (_, same, _) in zip(plain.named_trained(), recorded.named_trained(), strict=True):
            assert torch.equal(weight, same), name
    assert recorder.played and sum(played.times for played in recorder.played) >= 8


def test_prompts_are_padded_alike_before_the_first_step_and_in_it(act, learner_batch, configure, build):
    learner = build(init_tiny("autoregressive", seed=3), configure(optim={"microbatch_size": 3}))
    record(learner)
    batch = learner_batch(learner, act(learner.policy))
    evaluate, widths = learner.policy.evaluate, []

    def noted(inputs, *given, **options):
        widths.append(inputs.input_ids.shape[1])
        return evaluate(inputs, *given, **options)

    learner.policy.evaluate = noted
    result = annotated_update(learner, batch, 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0
    assert widths and all(width % 8 == 0 for width in widths)


class Counting:
    """A pass of a single weight, and its recorder."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1))
        network = SimpleNamespace(parameters=lambda: iter([self.weight]), weights_changed=lambda: None)
        self.recorder = PlayedRecorder([self.weight])
        self.passes = RecordedPasses(self.work, [network], self.recorder)

    def work(self, part, train_policy, value_weight, kl_coef) -> PassSums:
        loss = (self.weight * part.advantages).sum() * value_weight
        loss.backward()
        return PassSums((("loss", ""),), loss.detach().double()[None], len(part), None)

    def __call__(self, rows: int, scale: float = 1.0) -> float:
        """The loss of so many rows."""
        given = torch.full((rows, 1), scale)
        part = TrainBatch(
            no_inputs(rows), token_decisions(given.long(), given, 1), torch.arange(rows), advantages=given
        )
        return float(self.passes(part, True).values)


def test_a_shape_is_recorded_the_third_time_that_it_occurs_and_read_from_then_on():
    counting = Counting()
    counting.passes.begin(2.0, 0.0)
    assert [counting(rows) for rows in (3, 3, 1, 3)] == [6.0, 6.0, 2.0, 6.0]
    assert (counting.recorder.warmed, len(counting.recorder.played)) == (3, 1)
    assert counting.weight.grad.item() == 20.0
    counting.passes.begin(10.0, 0.0)
    assert counting(3, scale=2.0) == 60.0, "other values of the same shape, another factor"
    assert counting.weight.grad.item() == 80.0


def test_a_new_shape_takes_the_place_of_the_one_that_was_replayed_least_recently(monkeypatch):
    monkeypatch.setattr("vlarl.training.recorded.MAX_RECORDINGS", 2)
    counting = Counting()
    counting.passes.begin(1.0, 0.0)
    shapes = (1, 1, 1, 2, 2, 2, 1, 3, 3, 3, 1, 2)
    assert [counting(rows) for rows in shapes] == [float(rows) for rows in shapes]
    assert [played.times for played in counting.recorder.played] == [3, 1, 1], "1 was replayed after 2, which made room"
    assert counting.recorder.warmed == 7, "2 occurs as if for the first time"


def test_where_memory_is_scarce_no_pass_runs_beside_recordings_before_it_is_recorded_itself():
    counting, beside = Counting(), []
    counting.recorder.scarce, warm = True, counting.recorder.warm
    counting.recorder.warm = lambda work: (beside.append(len(counting.passes._recordings)), warm(work))[1]
    counting.passes.begin(1.0, 0.0)
    for rows in (3, 3, 3, 1, 3, 1, 3):
        counting(rows)
    assert beside == [0, 0, 0, 0], "the first and the second time of either shape"


def test_memory_of_a_recording_that_failed_is_given_back():
    counting, renewed = Counting(), []
    counting.recorder.renew = lambda: renewed.append(1)
    counting.passes.begin(1.0, 0.0)
    assert [counting(3), counting(3)] == [3.0, 3.0] and not counting.recorder.release() and renewed == []

    def full(work):
        raise torch.OutOfMemoryError("CUDA out of memory")

    counting.recorder.capture = full
    with pytest.raises(torch.OutOfMemoryError):
        counting(3)
    assert not counting.recorder.release() and renewed == [1], "nothing was recorded, but memory was taken"
    assert not counting.recorder.release() and renewed == [1]


class FullBesideRecordings:
    """Recording, or a pass that is not recorded, runs out of memory beside recordings of microbatches of two."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.times = learner, 0

    def check(self) -> None:
        if self.learner.recorded._recordings and self.learner.microbatches.optim.microbatch_size == 2:
            self.times += 1
            assert self.times < 10, "the update begins again without end"
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_two_shapes_that_do_not_fit_beside_each_other_are_halved(act, learner_batch, configure, build):
    config = configure(optim={"microbatch_size": 2}, algorithm={"epochs": 1})
    learner = build(init_tiny("autoregressive", seed=3), config)
    batch, recorder = prompted_alike(learner_batch(learner, act(learner.policy, lengths=(5,)))), record(learner)
    learner.microbatches._make_way, capture = recorder.release, recorder.capture
    full = FullBesideRecordings(learner)
    recorder.capture = lambda work: (full.check(), capture(work))[1]
    for _ in range(4):
        annotated_update(learner, batch, 1)
    assert learner.microbatches.optim.microbatch_size == 1 and full.times == 2


def test_a_recording_that_ends_in_another_error_for_want_of_memory_is_halved(act, learner_batch, configure, build):
    config = configure(optim={"microbatch_size": 2}, algorithm={"epochs": 1})
    learner = build(init_tiny("autoregressive", seed=3), config)
    batch, recorder = prompted_alike(learner_batch(learner, act(learner.policy, lengths=(4,)))), record(learner)
    learner.microbatches._make_way, capture = recorder.release, recorder.capture

    def ends_badly(work):
        if learner.microbatches.optim.microbatch_size == 2:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        return capture(work)

    recorder.capture = ends_badly
    for _ in range(3):
        annotated_update(learner, batch, 1)
    assert learner.microbatches.optim.microbatch_size == 1


@pytest.mark.parametrize("moved", ["weight", "gradient"])
def test_what_was_recorded_of_weights_that_have_moved_is_not_replayed(moved):
    counting = Counting()
    counting.passes.begin(1.0, 0.0)
    for _ in range(3):
        counting(1)
    if moved == "weight":
        counting.weight.data = counting.weight.data.clone() * 5
    else:
        counting.weight.grad = counting.weight.grad.clone()
    counting.passes.begin(1.0, 0.0)
    assert counting(1) == (5.0 if moved == "weight" else 1.0)
    assert [played.times for played in counting.recorder.played] == [1, 1]


def test_a_pass_that_cannot_be_recorded_runs_as_it_is_and_the_log_says_why(caplog):
    counting = Counting()

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    counting.recorder.capture = refuse
    counting.passes.begin(1.0, 0.0)
    assert [counting(1) for _ in range(5)] == [1.0] * 5
    assert counting.weight.grad.item() == 5.0
    (line,) = [r.message for r in caplog.records]
    assert line.endswith("slower with small microbatches: operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sharding": Sharding("full")}, "sharded"),
        ({"ranks": SimpleNamespace(world_size=2)}, "several ranks"),
        ({"records": False}, "can't be recorded"),
        ({"device": "cpu"}, None),
        ({"optim": OptimConfig(cuda_graphs=False)}, None),
    ],
)
def test_what_is_not_recorded_and_which_reasons_the_log_gives(given, reason, caplog):
    caplog.set_level("INFO")
    given = {"sharding": Sharding(), "ranks": SingleRank(), "records": True, "device": "cuda"} | given
    network = SimpleNamespace(records_updates=given["records"])
    optim, device = given.get("optim", OptimConfig()), torch.device(given["device"])
    assert recorded_passes(None, [network], optim, device, given["ranks"], given["sharding"]) is None
    assert (reason in caplog.text) if reason else not caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a GPU")
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_on_a_gpu_recorded_updates_are_the_plain_ones(act, learner_batch, configure, tmp_path, kind):
    """Adapters, layers recomputed, prompts of several lengths, rollouts recorded in the same memory in between."""
    init_tiny("autoregressive", seed=3).save(tmp_path)
    learners = []
    for on in (False, True):
        policy = load_policy(tmp_path, dtype=kind, device="cuda")
        policy.prepare_training(ModelConfig(dtype=kind, gradient_checkpointing=True), LoraConfig(enabled=True), seed=0)
        config = configure(optim={"lr": 1e-3, "microbatch_size": 2, "cuda_graphs": on}, algorithm={"epochs": 4})
        learners.append(Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, policy.device))
    plain, recorded = learners
    assert plain.recorded is None and recorded.recorded is not None
    batch = learner_batch(recorded, act(init_tiny("autoregressive", seed=3)))
    batch = prompted_alike(batch) if kind == "float32" else batch
    engines = [TorchEngine(learner.policy, learner.device) for learner in learners]
    tolerance = {"float32": 0.01, "bfloat16": 0.1}[kind]  # kernels of backward passes add in any order
    for iteration in range(1, 4):
        expected, found = (annotated_update(learner, batch, iteration) for learner in learners)
        first_errors = [result.metrics["ratio_first_minibatch_error"] for result in (expected, found)]
        assert first_errors[1] <= first_errors[0] + 1e-6
        assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=tolerance)
        assert found.metrics["policy_loss"] == pytest.approx(expected.metrics["policy_loss"], abs=tolerance)
        with torch.no_grad():  # what has come of rounding does not grow
            for (_, weight, _), (_, same, _) in zip(plain.named_trained(), recorded.named_trained(), strict=True):
                same.copy_(weight)
        for engine in engines:
            engine.weights_changed(iteration)
        seeds = list(range(len(batch)))
        first, second = (engine.generate(batch.inputs, Sampling(1.0), seeds) for engine in engines)
        assert torch.equal(first.sample.ids, second.sample.ids)
        assert (first.engine_logprobs - second.engine_logprobs).abs().max() <= tolerance
    assert recorded.recorded._recordings, "a shape has occurred three times"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a GPU")
def test_on_a_gpu_a_pass_that_waits_for_the_device_is_not_recorded(act, learner_batch, configure, caplog):
    policy = init_tiny("parallel", seed=3).to("cuda")
    config = configure(optim={"microbatch_size": 2}, algorithm={"epochs": 4})
    learner = Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, policy.device)
    batch = prompted_alike(learner_batch(learner, act(init_tiny("parallel", seed=3))))
    evaluate = policy.evaluate

    def waits(*given, **options):
        evaluation = evaluate(*given, **options)
        evaluation.logprobs.sum().item()
        return evaluation

    policy.evaluate = waits
    results = [annotated_update(learner, batch, iteration) for iteration in (1, 2)]
    assert "is not recorded as a CUDA graph" in caplog.text
    assert all(result.num_skipped == 0 for result in results)
    assert torch.randn(1, device="cuda").isfinite().item(), "the generator is not left in the middle of a capture"


def test_recordings_make_way_before_a_microbatch_is_halved_and_are_made_again(act, learner_batch, configure, build):
    learner = build(
        init_tiny("autoregressive", seed=3), configure(optim={"microbatch_size": 2}, algorithm={"epochs": 1})
    )
    batch, recorder = prompted_alike(learner_batch(learner, act(learner.policy, lengths=(4,)))), record(learner)
    learner.microbatches._make_way = recorder.release
    for _ in range(2):
        annotated_update(learner, batch, 1)
    assert len(recorder.played) == 1 and learner.recorded._recordings
    evaluate, failures = learner.policy.evaluate, []

    def full(*args, **options):
        if not failures:
            failures.append(len(learner.recorded._recordings))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(*args, **options)

    learner.policy.evaluate = full
    result = annotated_update(learner, batch, 1)
    assert failures == [1] and learner.microbatches.optim.microbatch_size == 2
    assert result.metrics["oom_retries"] == 1 and len(recorder.played) == 2


def test_a_recording_that_does_not_fit_makes_the_microbatch_smaller(act, learner_batch, configure, build):
    """It is not taken for a pass that can't be recorded."""
    learner = build(
        init_tiny("autoregressive", seed=3), configure(optim={"microbatch_size": 2}, algorithm={"epochs": 1})
    )
    batch, recorder = prompted_alike(learner_batch(learner, act(learner.policy, lengths=(4,)))), record(learner)
    learner.microbatches._make_way = recorder.release
    recording = recorder.capture

    def too_large(work):
        sums = recording(work)
        if learner.microbatches.optim.microbatch_size == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sums

    recorder.capture = too_large
    for _ in range(3):
        annotated_update(learner, batch, 1)
    assert learner.microbatches.optim.microbatch_size == 1 and learner.recorded._recordings
