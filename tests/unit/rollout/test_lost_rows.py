"""Observations that are lost with their machine: their episodes are run again, and the others continue."""

from dataclasses import dataclass

import numpy as np
import torch
from fakes.rollouts import collected

from vlarl.decisions import Row, TensorRows
from vlarl.envs.base import NOTHING, AsyncPool, SuiteSpec, TaskSpec, started
from vlarl.errors import RowsLostError
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.rollout.collector import Collector
from vlarl.types import ChunkOutcome, Observation, Task

LENGTH = 3  # decisions of an episode


@dataclass(frozen=True)
class Stored(TensorRows):
    """A row on a machine, which says the task and the step."""

    machine: str
    ids: torch.Tensor  # [1, 2]

    def gone(self, missed):
        return self.machine == missed


class Pool(AsyncPool):
    """Slot i is on machine i; after a loss it is on another one."""

    lockstep = False

    def __init__(self, num_envs):
        self.spec = SuiteSpec("fake", (TaskSpec(0, "0", 99),), (0,), (1,), (1,))
        self.num_envs = num_envs
        self.machines = [f"machine {slot}" for slot in range(num_envs)]
        self.steps, self.tasks, self.outcomes, self.resets = {}, {}, [], []

    def _observe(self, slot):
        ids = torch.tensor([[self.tasks[slot], self.steps[slot]]])
        row = Row(Stored(self.machines[slot], ids), 0)
        return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), "", inputs=row)

    def send_reset(self, slots, tasks, record=NOTHING):
        for slot, task in zip(slots, tasks, strict=True):
            self.steps[slot], self.tasks[slot] = 0, task.seed
            self.resets.append(task.seed)
            self.outcomes.append((slot, started(self._observe(slot))))

    def send_chunk(self, slots, actions, record=NOTHING):
        for slot in slots:
            self.steps[slot] += 1
            done = self.steps[slot] == LENGTH
            outcome = ChunkOutcome(np.ones(1, np.float32), 1, done, False, done, self._observe(slot))
            self.outcomes.append((slot, outcome))

    def receive(self):
        assert self.outcomes, "nothing was sent"
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


class Policy:
    def act(self, decisions):
        return [np.zeros((1, 7), np.float32)] * len(decisions)


class Engine:
    """Can't fetch what is on the lost machine, from a certain step on, so many times."""

    version = 0

    def __init__(self, pool, lost, step, times=1):
        self.pool, self.lost, self.step, self.times = pool, lost, step, times

    def generate(self, inputs, sampling, seeds):
        rows = inputs.joined()
        there = {batch.machine for batch in inputs.batches}
        if self.times and self.lost in there and int(rows.ids[:, 1].max()) >= self.step:
            self.times -= 1
            if not self.times:
                self.pool.machines = [f"other {slot}" for slot in range(self.pool.num_envs)]
            raise RowsLostError("lost with the machine", self.lost)
        return token_decisions(rows.ids, -rows.ids.float(), action_dim=1).of_version(0)


def trajectories(collector, count):
    episodes = collected(collector, [Task("fake", 0, 0, seed=i) for i in range(count)], 1.0)
    return [episode.trajectory for episode in episodes]


def test_episodes_whose_observation_is_lost_are_run_again_and_the_others_continue():
    pool = Pool(3)
    collector = Collector(pool, Policy(), Engine(pool, "machine 1", step=1))
    episodes = trajectories(collector, 3)
    assert pool.resets == [0, 1, 2, 1], "the others were not begun again"
    assert [episode.num_retries for episode in episodes] == [0, 1, 0]
    for index, episode in enumerate(episodes):
        steps = [t.decision.sample.ids.tolist() for t in episode.transitions]
        assert episode.status == "ok" and steps == [[[index, step]] for step in range(LENGTH)]


def test_an_episode_that_is_lost_again_and_again_is_given_up():
    pool = Pool(2)
    collector = Collector(pool, Policy(), Engine(pool, "machine 0", step=0, times=9), retries=1)
    lost, fine = trajectories(collector, 2)
    assert (lost.status, lost.num_retries, fine.status) == ("crashed", 1, "ok")
