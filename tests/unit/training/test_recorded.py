"""Recorded updates: what is copied, added and recorded when, with a recorder that replays by calling Python again; and
on a GPU the recordings themselves."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated_update

from vlarl.algorithms import build_algorithm
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.learner import Learner
from vlarl.training.ranks import SingleRank
from vlarl.training.recorded import RecordedPasses, recorded_passes
from vlarl.training.fsdp import Sharding

PPO = {"name": "ppo", "critic_hidden": (16,)}


class Played:
    """Calls the recorded work again and writes its sums where the recording's are, as a CUDA graph would."""

    def __init__(self, work: Callable, sums: object) -> None:
        self.work, self.sums, self.times = work, sums, 0

    def replay(self) -> None:
        self.times += 1
        self.sums.values.copy_(self.work().values)


class PlayedRecorder:
    """Recording leaves gradients and values as they were; what is recorded reads the recording's own tensors."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters, self.played, self.warmed = parameters, [], 0

    def warm(self, work):
        self.warmed += 1
        return work()

    def record(self, work):
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
    "grpo": {"algorithm": {"name": "grpo", "epochs": 4}},
    "ppo": {"algorithm": PPO | {"epochs": 4, "gae_level": "step"}},
    "ppo, critic first": {"algorithm": PPO | {"epochs": 4, "value_init_steps": 1}},
    "ppo, separate": {"algorithm": PPO | {"epochs": 4}, "critic": {"kind": "separate"}},
    "kl": {"algorithm": {"name": "grpo", "epochs": 4}, "kl": {"coef": 0.1, "target": 0.01}},
    "reconstruction": {"algorithm": {"name": "grpo", "epochs": 4, "action_reconstruction_coef": 0.1}},
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_updates_are_the_plain_ones_to_the_bit(act, learner_batch, policy_of, configure, build, case):
    """Two updates of four epochs with two microbatches of one shape and a smaller one."""
    policy = policy_of("parallel")
    config = configure(optim={"lr": 1e-3, "microbatch_size": 2, "weight_decay": 0.1}, **CASES[case])
    plain, recorded = (build(copy.deepcopy(policy), config) for _ in range(2))
    recorder = record(recorded)
    batch = learner_batch(plain, act(policy))
    row = int(batch.inputs.lengths.argmax())  # one prompt for all: recorded passes pad others, and would round otherwise
    alike = {name: getattr(batch.inputs, name)[row].expand(len(batch), -1) for name in ("input_ids", "attention_mask")}
    batch = replace(batch, inputs=replace(batch.inputs, **alike, known_ragged=None))
    for iteration in (1, 2):
        expected, found = (annotated_update(learner, batch, iteration) for learner in (plain, recorded))
        assert found.metrics == expected.metrics
        assert expected.metrics["ratio_first_minibatch_error"] == 0.0
        for (name, weight, _), (_, same, _) in zip(plain.named_trained(), recorded.named_trained(), strict=True):
            assert torch.equal(weight, same), name
    assert recorder.played and max(played.times for played in recorder.played) > 4


@pytest.fixture
def policy_of() -> Callable[[str], OpenVLAPolicy]:
    from vlarl.policies.tiny import init_tiny

    return lambda decoder: init_tiny(decoder, seed=3)
