"""Success at exactly the last allowed step is a success: the time limit does not override it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import NoInputs, no_inputs
from fakes.rollouts import collected
from fakes.worker_envs import SPEC, CountingFactory

from vlarl.decisions import Decisions, Sampling
from vlarl.envs.base import EnvPool
from vlarl.envs.process_pool import WorkerPool
from vlarl.envs.tabletop import ScriptedExpert, TabletopPool
from vlarl.policies.openvla.decisions import RegressedActions, regressed_decisions
from vlarl.rollout.collector import Collector
from vlarl.rollout.statistics import rollout_metrics
from vlarl.types import EpisodeResult, Observation, Task, Trajectory


class Script:
    """A policy and its engine that play fixed actions, `chunk_length` at a time, in one environment."""

    version = 0

    def __init__(self, actions: np.ndarray, chunk_length: int) -> None:
        self.num_steps = chunk_length
        rest = np.zeros((chunk_length, actions.shape[1]), np.float32)
        self._actions = np.concatenate([actions.astype(np.float32), rest])
        self._next = 0

    def process(self, observations: Sequence[Observation]) -> NoInputs:
        assert len(observations) == 1
        return no_inputs()

    def generate(self, inputs: NoInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        chunk = self._actions[self._next : self._next + self.num_steps]
        self._next += self.num_steps
        return regressed_decisions(torch.from_numpy(chunk[None])).of_version(self.version)

    def act(self, decisions: Decisions) -> list[np.ndarray]:
        assert isinstance(decisions.sample, RegressedActions)
        return list(decisions.sample.actions.numpy())


def play(pool: EnvPool, task: Task, actions: np.ndarray, chunk_length: int) -> Trajectory:
    script = Script(actions, chunk_length)
    (episode,) = collected(Collector(pool, script, script), [task], 1.0)  # type: ignore[arg-type]
    return episode.trajectory


def assert_won_at(trajectory: Trajectory, limit: int) -> None:
    assert (trajectory.length, trajectory.success) == (limit, True)
    assert (trajectory.terminated, trajectory.truncated) == (True, False), "the end of the task wins over the limit"
    assert EpisodeResult.of(trajectory, "go", ()).outcome == "success"
    assert rollout_metrics([trajectory], 1.0)["rollout/success_rate"] == 1.0


def assert_out_of_time(trajectory: Trajectory, limit: int) -> None:
    assert (trajectory.length, trajectory.success) == (limit, False)
    assert (trajectory.terminated, trajectory.truncated) == (False, True)
    assert EpisodeResult.of(trajectory, "go", ()).outcome == "failure"
    assert rollout_metrics([trajectory], 1.0)["rollout/success_rate"] == 0.0


TABLETOP_TASK = Task("tabletop_object", 7, 0, seed=5)


def tabletop(limit: int | None = None) -> TabletopPool:
    return TabletopPool(TABLETOP_TASK.suite, 1, 24, max_steps=limit)


@pytest.fixture(scope="module")
def expert_actions() -> np.ndarray:
    """[T, 7] what the tabletop's expert does up to its success."""
    pool = tabletop()
    pool.reset([0], [TABLETOP_TASK])
    expert, actions = ScriptedExpert(pool.world), []
    expert.reset(0, 0)
    for _ in range(pool.spec.tasks[0].max_steps):
        actions.append(expert.act(np.array([0]))[0])
        (outcome,) = pool.step_chunk([0], actions[-1][None, None])
        if outcome.success:
            return np.stack(actions)
    raise AssertionError("the expert fails")


@pytest.mark.parametrize("chunk_length", [1, 4, 100], ids=["steps", "chunks", "one_chunk"])
def test_on_the_tabletop(expert_actions, chunk_length):
    needed = len(expert_actions)
    won = play(tabletop(needed), TABLETOP_TASK, expert_actions, chunk_length)
    assert_won_at(won, needed)
    assert won.env_return == 1.0
    late = play(tabletop(needed - 1), TABLETOP_TASK, expert_actions, chunk_length)
    assert_out_of_time(late, needed - 1)
    assert late.env_return == 0.0


COUNTING_TASK = Task("counting", 0, 0, seed=0)  # succeeds when the sum of the first actions reaches 5


@pytest.fixture
def counting() -> Iterator:
    """counting(limit, own_limit): the environment in a process, with the suite's time limit and one of its own."""
    made: list[WorkerPool] = []

    def make(limit: int, own_limit: int = 0) -> WorkerPool:
        spec = replace(SPEC, tasks=tuple(replace(task, max_steps=limit) for task in SPEC.tasks))
        made.append(WorkerPool(CountingFactory((("truncate", own_limit),), spec=spec), 1))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.mark.parametrize("chunk_length", [1, 3, 100], ids=["steps", "chunks", "one_chunk"])
def test_in_a_process_of_its_own(counting, chunk_length):
    actions = np.array([[0.0, 0.0]] * 2 + [[1.0, 0.0]] * 5)  # reaches 5 in step 7
    assert_won_at(play(counting(7), COUNTING_TASK, actions, chunk_length), 7)
    assert_out_of_time(play(counting(6), COUNTING_TASK, actions, chunk_length), 6)
    own = play(counting(99, own_limit=7), COUNTING_TASK, actions, chunk_length)
    assert_won_at(own, 7)
