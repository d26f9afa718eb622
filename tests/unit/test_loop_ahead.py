"""What the loop adds to rollouts in a stream: rewards, reports, metrics, resuming, and that the bound is checked."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.decisions import NoInputs
from fakes.streaming import CountingSampler, Stream, StreamEngine, StreamPolicy, StreamPool, groups_of, key

from vlarl.config.schema import Config
from vlarl.errors import UsageError, VlarlError
from vlarl.interrupt import InterruptGuard
from vlarl.loop import check_staleness, rollouts
from vlarl.observability.clock import Stopwatch
from vlarl.observability.trace import NoTrace
from vlarl.rewards.base import Reward
from vlarl.rewards.outcome import SparseReward
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.ahead import RolloutsAhead
from vlarl.rollout.collector import Collector, Episode
from vlarl.run.open import _restore_rollouts
from vlarl.run.schedule import Schedule
from vlarl.training.state import TrainerState


class StatefulSampler(CountingSampler):
    def state(self) -> dict[str, Any]:
        return {"reported": len(self.reported)}

    def metrics(self) -> dict[str, float]:
        return {"rollout/curriculum": 1.0}

    describe = state


@dataclass
class StreamSession:
    config: Config
    state: TrainerState = field(default_factory=TrainerState)
    guard: InterruptGuard = field(default_factory=InterruptGuard)
    shown: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.config)

    @property
    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(note=lambda text: None, rollout=lambda *row: self.shown.append(row))

    def stopwatch(self, track: str = "loop") -> Stopwatch:
        return Stopwatch(NoTrace(), track)

    def episode_ended(self, episode: Episode) -> None:
        pass


def opened(iteration: int = 0, reward: Reward | None = None, **state: Any) -> tuple[SimpleNamespace, StreamSession]:
    config = Config.model_validate(
        {
            "run": {"iterations": 3},
            "rollout": {"num_groups": 2, "group_size": 2},
            "distributed": {"asynchronous": True, "max_staleness": 1},
        }
    )
    pool, engine = StreamPool(3, lambda task: 1 + task.member), StreamEngine()
    engine.version = iteration
    parts = SimpleNamespace(
        collector=Collector(pool, StreamPolicy(), engine),
        engine=engine,
        pool=pool,
        sampler=StatefulSampler(2, 2),
        reward=SafeReward(reward or SparseReward(), retries=0),
        algorithm=SimpleNamespace(has_learning_signal=lambda members: True),
    )
    return parts, StreamSession(config, TrainerState(iteration=iteration, **state))


def test_a_rollout_of_the_stream_has_everything_that_an_iteration_reports():
    parts, session = opened()
    with rollouts(parts, session) as source:
        assert isinstance(source, RolloutsAhead)
        rollout = source.get(1)
    assert rollout.iteration == 1 and rollout.env_steps == 2 * (1 + 2), "of two groups, whose members are 1 and 2 long"
    assert len(rollout.trajectories) == len(rollout.kept) == 4 and rollout.sampler_state == {"reported": 4}
    names = {"rollout/collection_time", "rollout/mean_length", "rollout/curriculum", "rollout/groups_waiting"}
    assert names <= rollout.metrics.keys() and rollout.metrics["rollout/num_trajectories"] == 4
    assert rollout.seconds["rollout"] == rollout.metrics["rollout/collection_time"] > 0 and "reward" in rollout.seconds
    assert isinstance(rollout.kept[0].transitions[0].inputs.batch, NoInputs), "what is trained on is all there"
    assert (2, 2, "groups") in session.shown


def test_a_resumed_loop_begins_with_the_outstanding_groups_of_its_state():
    parts, session = opened()
    parts.pool.is_held = lambda task: key(task) == (1, 0, 1)
    with rollouts(parts, session) as source:
        first = source.get(1)
    assert groups_of(first.kept) == [(1, 1), (2, 0)]
    parts, session = opened(1, open_episodes=json.loads(json.dumps(first.open_episodes)))
    trained = groups_of(first.kept)
    with rollouts(parts, session) as source:
        for iteration in (2, 3):
            trained += groups_of(source.get(iteration).kept)
            parts.engine.version += 1
            source.updated()
    assert sorted(trained) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)] and parts.sampler.batches == [3]


def test_a_run_that_was_asynchronous_before_is_not_continued_in_turn():
    """Some groups of a batch are trained on, some are not: in turn, samples would be missed and others used twice."""
    parts, session = opened()
    with rollouts(parts, session) as source:
        state = TrainerState(open_episodes=json.loads(json.dumps(source.get(1).open_episodes)))
    restored = SimpleNamespace(sampler=SimpleNamespace(restore=lambda state: None), segments=None)
    _restore_rollouts(restored, state, Path("step_000001"), True)
    refusal = (
        r"asynchronous = false: the checkpoint step_000001 is of an asynchronous run, and \d episodes .* --distributed"
    )
    with pytest.raises(UsageError, match=refusal):
        _restore_rollouts(restored, state, Path("step_000001"), False)


def test_a_run_that_was_not_asynchronous_before_continues_with_the_batch_of_its_iteration():
    parts, session = opened(1)
    with rollouts(parts, session) as source:
        assert groups_of(source.get(2).kept) == [(2, 0), (2, 1)] and parts.sampler.batches == [2, 3]


class FailingReward(SparseReward):
    """Fails on all episodes of some groups."""

    def __init__(self, *groups: tuple[int, int]) -> None:
        self.groups = groups

    def score(self, trajectory):
        if trajectory.group in self.groups:
            raise ZeroDivisionError("no reward")
        return super().score(trajectory)


def test_a_reward_may_fail_on_a_group_and_must_not_on_all_of_an_iteration():
    """Its failure rate is that of the episodes of an update, however few of them come at a time."""
    parts, session = opened(reward=FailingReward((1, 0)))
    with rollouts(parts, session) as source:
        rollout = source.get(1)
        assert rollout.metrics["rollout/reward_failures"] == 2 and len(rollout.kept) == 2
    parts, session = opened(reward=FailingReward((1, 0), (1, 1), (2, 0), (2, 1)))
    with rollouts(parts, session) as source, pytest.raises(VlarlError, match="iteration 1: the reward failed on"):
        source.get(1)


def test_a_decision_that_is_too_old_is_never_trained_on():
    stream = Stream()
    with stream.open() as source:
        kept = source.get(1).kept
    _, session = opened(1)
    assert check_staleness(SimpleNamespace(learner=SimpleNamespace(version=1)), session, kept) == {
        "train/staleness_mean": 1.0,
        "train/staleness_max": 1.0,
    }
    with pytest.raises(RuntimeError, match=r"2 updates old, and distributed\.max_staleness is 1"):
        check_staleness(SimpleNamespace(learner=SimpleNamespace(version=2)), session, kept)
    in_turn = session.config.distributed.model_copy(update={"asynchronous": False})
    session = replace(session, config=session.config.model_copy(update={"distributed": in_turn}))
    assert check_staleness(SimpleNamespace(learner=SimpleNamespace(version=9)), session, kept) == {}
