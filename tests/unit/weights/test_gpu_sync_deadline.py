"""An engine that is lost in a sync by nccl or ipc does not hang the learners; vLLM's sender is a fake that waits."""

import threading

import pytest
import torch

from vlarl.errors import WorkerLostError
from vlarl.policies.tiny import init_tiny
from vlarl.training.ranks import SingleRank
from vlarl.weights import sender as sender_module
from vlarl.weights.sender import EngineLostError, Transport, WatchedEngines, WeightSender

LONG, SHORT = 60.0, 0.3


class Engines:
    """Two engines; the first may die when it is sent weights."""

    processes = ("engine 0", "engine 1")
    num_ranks = 2

    def __init__(self, dies: bool) -> None:
        self.dies, self.abandoned = dies, []

    def update_weights(self, message) -> None:
        if self.dies:
            raise EngineLostError("engine 0", "did not reply in a sync (ActorDiedError)")

    def abandon(self, lost) -> None:
        self.abandoned.append(lost)


class GpuSender:
    """Calls the engines in a thread, as vLLM's sender does, and waits for them inside NCCL: for ever if it hangs."""

    def __init__(self, engines: WatchedEngines, hangs: bool, released: threading.Event) -> None:
        self.engines, self.hangs, self.released = engines, hangs, released

    def send(self, stream, version) -> None:
        failed: list[EngineLostError] = []

        def call() -> None:
            try:
                self.engines.update_weights({})
            except EngineLostError as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if self.hangs:
            self.released.wait(LONG)
        if failed:
            raise failed[0]


class Sender(WeightSender):
    """The rank's side, with that sender."""

    def __init__(self, policy, hangs: bool, timeout_s: float, rank: int = 0) -> None:
        ranks = SingleRank()
        ranks.rank = rank
        super().__init__(policy, ranks, Transport("nccl", torch.float32, 1 << 20, False, lambda: ("", 0), timeout_s))
        self.hangs, self.released = hangs, threading.Event()

    def _gpu_sender(self, engines):
        self._watched = WatchedEngines(engines)
        return GpuSender(self._watched, self.hangs, self.released)


@pytest.fixture(scope="module")
def policy():
    return init_tiny("parallel", seed=1)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(sender_module, "GRACE_S", SHORT)


def test_a_sync_that_ends_is_as_before(policy):
    assert Sender(policy, hangs=False, timeout_s=LONG).send(Engines(dies=False), 4) is None


def test_a_lost_engine_that_the_sender_reports_is_named(policy):
    made = Sender(policy, hangs=False, timeout_s=LONG)
    engines = Engines(dies=True)
    assert made.send(engines, 4) == "engine 0" and engines.abandoned == ["engine 0"]


def test_a_rank_that_waits_for_a_lost_engine_is_given_up_soon(policy):
    made = Sender(policy, hangs=True, timeout_s=LONG)
    with pytest.raises(
        WorkerLostError, match=r"learner 0 can't finish the weight sync to version 4 by nccl: engine 0 did not reply"
    ) as lost:
        made.send(Engines(dies=True), 4)
    made.released.set()
    assert lost.value.worker == "learner 0", "the learners are started again"


def test_a_rank_that_waits_for_the_others_is_given_up_when_its_time_is_over(policy):
    made = Sender(policy, hangs=True, timeout_s=SHORT, rank=1)
    with pytest.raises(WorkerLostError, match=r"learner 1 can't finish .* by nccl: it has not ended within 0.3 s"):
        made.send(Engines(dies=False), 4)
    made.released.set()
