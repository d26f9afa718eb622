"""The collector: with a pool and an engine written by hand, and with a real policy in crowds of all sizes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import engine_logprobs, taken_ids
from fakes.rollouts import collected

from vlarl.decisions import Decisions, Row, Sampling
from vlarl.envs.base import NOTHING, LockstepPool, Record, SuiteSpec, TaskSpec
from vlarl.envs.tabletop import TabletopPool
from vlarl.errors import VlarlError
from vlarl.observability.log_file import log_to_file
from vlarl.policies.openvla.decisions import RegressedActions, regressed_decisions, token_decisions, token_ids
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.statistics import rollout_metrics, staleness_metrics
from vlarl.rollout.steps import RecordingPlan
from vlarl.rollout.tasks import derive_seed
from vlarl.types import ChunkOutcome, Observation, Task

CHUNK = 2


class FakePool(LockstepPool):
    """Episode of task i lasts `lengths[i]` steps; the observation says which task and step it is."""

    def __init__(self, num_envs: int, lengths: Sequence[int], crash: Sequence[int] = ()) -> None:
        super().__init__()
        self.spec = SuiteSpec("fake", tuple(TaskSpec(i, str(i), 99) for i in range(len(lengths))), (0,), (1,), (1,))
        self.num_envs = num_envs
        self.lengths, self.crash = lengths, set(crash)
        self.slots: dict[int, list[int]] = {}
        self.resets: list[tuple[int, int]] = []
        self.actions: dict[int, list[float]] = {}

    def _observe(self, slot: int) -> Observation:
        task, step = self.slots[slot]
        return Observation(np.full((1, 1, 1, 3), task, np.uint8), np.full(8, step, np.float32), str(task))

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        for slot, task in zip(slots, tasks, strict=True):
            assert slot not in self.slots, "a running slot was reset"
            self.slots[slot] = [task.task_id, 0]
            self.resets.append((slot, task.task_id))
        return [self._observe(slot) for slot in slots]

    def step_chunk(self, slots: Sequence[int], actions: np.ndarray, record: Record = NOTHING) -> list[ChunkOutcome]:
        outcomes = []
        for slot, chunk in zip(slots, actions, strict=True):
            task, step = self.slots[slot]
            executed = min(CHUNK, self.lengths[task] - step)
            self.actions.setdefault(task, []).extend(chunk[:executed, 0].tolist())
            self.slots[slot][1] += executed
            done = self.slots[slot][1] == self.lengths[task]
            crashed = done and task in self.crash
            rewards = np.zeros(CHUNK, np.float32)
            rewards[:executed] = 1
            outcomes.append(
                ChunkOutcome(
                    rewards=rewards,
                    num_executed=executed,
                    terminated=done and not crashed and task % 2 == 0,
                    truncated=done and not crashed and task % 2 == 1,
                    success=done and not crashed and task % 2 == 0,
                    observation=self._observe(slot),
                    frames=tuple(self.frame(slot) for _ in range(executed)) if slot in record.frames else (),
                    error="the simulator died" if crashed else None,
                )
            )
            if done:
                del self.slots[slot]
        return outcomes

    def frame(self, slot: int) -> np.ndarray:
        return np.full((2, 2, 3), self.slots[slot][0], np.uint8)

    def close(self) -> None:
        pass


class FakePolicy:
    """Reads nothing but the task and the step; its actions are ten times the tokens, or what was regressed."""

    num_steps = CHUNK

    def process(self, observations: Sequence[Observation]) -> OpenVLAInputs:
        ids = torch.tensor([[int(o.images.max()), int(o.proprio[0])] for o in observations])
        return OpenVLAInputs(ids, ids > -1, ids, None)

    def act(self, decisions: Decisions) -> list[np.ndarray]:
        sample = decisions.sample
        regressed = isinstance(sample, RegressedActions)
        actions = sample.actions if regressed else token_ids(decisions).reshape(-1, CHUNK, 1).float()
        return list(10 * actions.numpy())


class FakeEngine:
    """Token = 100 * task + step, then + 1; records the seeds and the size of each batch."""

    version = 7

    def __init__(self) -> None:
        self.seeds: dict[tuple[int, int], int] = {}
        self.batches: list[int] = []

    def generate(self, inputs: OpenVLAInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        assert sampling == Sampling(0.5)
        rows = inputs.input_ids.tolist()
        self.batches.append(len(rows))
        for (task, step), seed in zip(rows, seeds, strict=True):
            self.seeds[task, step] = seed
        ids = torch.tensor([[100 * task + step, 100 * task + step + 1] for task, step in rows])
        return token_decisions(ids, -ids.float(), action_dim=1).of_version(self.version)


class RegressingEngine(FakeEngine):
    """Returns actions of a regression head instead of tokens."""

    def generate(self, inputs: OpenVLAInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        tokens = super().generate(inputs, sampling, seeds)
        return regressed_decisions(token_ids(tokens).float().unsqueeze(2) + 0.5).of_version(self.version)


LENGTHS = [5, 1, 2, 7, 3, 4]


def tasks(count: int = len(LENGTHS)) -> list[Task]:
    return [Task("fake", i, 0, seed=50 + i, group=i // 2, member=i % 2) for i in range(count)]


def test_the_regression_head_acts_where_the_engine_has_one():
    pool = FakePool(2, LENGTHS)
    episodes = collected(Collector(pool, FakePolicy(), RegressingEngine()), tasks(), 0.5)
    for i, episode in enumerate(episodes):
        assert pool.actions[i] == [10 * (100 * i + s + 0.5) for s in range(LENGTHS[i])]
        first = episode.trajectory.transitions[0].decision
        assert first.sample.actions.tolist() == [[[100 * i + 0.5], [100 * i + 1.5]]]
        assert first.engine_logprobs.tolist() == [[0, 0]]


@pytest.mark.parametrize("num_envs", [1, 2, 4, 20])
def test_every_task_is_run_once_and_results_keep_its_order(num_envs):
    pool, engine = FakePool(num_envs, LENGTHS), FakeEngine()
    episodes = collected(Collector(pool, FakePolicy(), engine), tasks(), 0.5)
    assert [e.trajectory.task for e in episodes] == tasks()
    for i, episode in enumerate(episodes):
        trajectory = episode.trajectory
        assert trajectory.length == LENGTHS[i] and trajectory.env_return == LENGTHS[i]
        executed = [t.num_executed for t in trajectory.transitions]
        assert executed == [2] * (LENGTHS[i] // 2) + [1] * (LENGTHS[i] % 2)
        assert [int(t.observation.proprio[0]) for t in trajectory.transitions] == list(range(0, LENGTHS[i], 2))
        assert {int(t.observation.images.max()) for t in trajectory.transitions} == {i}
        assert trajectory.final_observation.proprio[0] == LENGTHS[i]
        assert [taken_ids(t).tolist() for t in trajectory.transitions] == [
            [100 * i + s, 100 * i + s + 1] for s in range(0, LENGTHS[i], 2)
        ]
        assert engine_logprobs(trajectory.transitions[0]).tolist() == [-100 * i, -100 * i - 1]
        assert (trajectory.terminated, trajectory.truncated) == (i % 2 == 0, i % 2 == 1)
        assert trajectory.success == (i % 2 == 0)
        assert trajectory.policy_version == 7 and trajectory.status == "ok" and episode.frames == ()
        assert pool.actions[i] == [10 * (100 * i + s) for s in range(LENGTHS[i])], "in the robot's units"
        for step in range(0, LENGTHS[i], 2):
            assert engine.seeds[i, step] == derive_seed(50 + i, step // 2)
    assert not pool.slots


def test_a_free_slot_takes_the_next_task_at_once():
    pool, engine = FakePool(2, LENGTHS), FakeEngine()
    ended = [index for index, _ in Collector(pool, FakePolicy(), engine).episodes(tasks(), Sampling(0.5))]
    # decisions: task 0 three, 1 one, 2 one, 3 four, 4 two, 5 two
    assert pool.resets == [(0, 0), (1, 1), (1, 2), (1, 3), (0, 4), (0, 5)]
    assert engine.batches == [2, 2, 2, 2, 2, 2, 1]
    assert ended == [1, 2, 0, 4, 3, 5]


def test_a_crashed_episode_is_counted_and_never_a_gap():
    pool = FakePool(3, LENGTHS, crash=[3])
    episodes = collected(Collector(pool, FakePolicy(), FakeEngine(), retries=2), tasks(), 0.5)
    assert [e.trajectory.status for e in episodes] == ["ok", "ok", "ok", "crashed", "ok", "ok"]
    assert [task for _, task in pool.resets].count(3) == 3, "two more attempts"
    crashed = episodes[3].trajectory
    assert crashed.num_retries == 2
    assert not crashed.terminated and not crashed.truncated and not crashed.success
    metrics = rollout_metrics([e.trajectory for e in episodes], seconds=2.0)
    assert metrics["rollout/num_trajectories"] == 5 and metrics["rollout/num_crashed"] == 1
    assert metrics["rollout/success_rate"] == pytest.approx(3 / 5)
    assert metrics["rollout/mean_length"] == pytest.approx((5 + 1 + 2 + 3 + 4) / 5)
    assert metrics["rollout/mean_return"] == metrics["rollout/mean_length"]
    assert metrics["rollout/retried_episodes"] == 2
    assert metrics["rollout/env_steps_per_s"] == pytest.approx((15 + 6) / 2)
    assert metrics["perf/decisions_per_s"] == pytest.approx((9 + 3) / 2)


class LearningEngine(FakeEngine):
    """Gets new weights after each batch of decisions."""

    def generate(self, inputs, sampling, seeds):
        decisions = super().generate(inputs, sampling, seeds)
        self.version += 1
        return decisions


def test_each_decision_knows_the_weights_that_made_it():
    """An episode is of the version that decided last, which may be older than the engine's when it ends."""
    pool = FakePool(2, LENGTHS, crash=[5])
    episodes = collected(Collector(pool, FakePolicy(), LearningEngine(), retries=0), tasks(), 0.5)
    # batches of decisions: tasks 0 1, 0 2, 0 3, 4 3, 4 3, 5 3, 5
    versions = [[t.version for t in episode.trajectory.transitions] for episode in episodes]
    assert versions == [[7, 8, 9], [7], [8], [9, 10, 11, 12], [10, 11], [12]]
    assert [episode.trajectory.policy_version for episode in episodes] == [9, 7, 8, 12, 11, 13]


def test_staleness_is_counted_in_updates_over_decisions(trajectory):
    def decided(*versions):
        episode = trajectory([[0.0]] * len(versions))
        steps = zip(episode.transitions, versions, strict=True)
        return replace(
            episode,
            transitions=tuple(replace(t, decided=Row(t.decision.of_version(version), 0)) for t, version in steps),
        )

    episodes = [decided(4, 5), decided(5), decided(2, 3, 5)]
    assert staleness_metrics(episodes, version=5) == {"train/staleness_mean": 1.0, "train/staleness_max": 3.0}
    assert staleness_metrics([], version=5) == {}


def test_nothing_but_crashes_ends_the_run():
    pool = FakePool(3, LENGTHS, crash=range(6))
    with pytest.raises(
        VlarlError, match=r"none of 6 episodes of fake could be run. The first one: the simulator died\."
    ):
        collected(Collector(pool, FakePolicy(), FakeEngine(), retries=0), tasks(), 0.5)


def test_that_none_could_be_run_names_the_file_with_the_whole_text(tmp_path):
    pool = FakePool(3, LENGTHS, crash=range(6))
    with log_to_file(tmp_path / "train.log"), pytest.raises(VlarlError) as failed:
        collected(Collector(pool, FakePolicy(), FakeEngine(), retries=0), tasks(), 0.5)
    assert f"The whole text of each is in {tmp_path / 'train.log'}." in str(failed.value)
    assert (tmp_path / "train.log").read_text().count("given up after 1 attempt: the simulator died") == 6


def test_an_episode_is_run_again_and_becomes_the_same_one():
    class DyingOnce(FakePool):
        def step_chunk(self, slots, actions, record=NOTHING):
            outcomes = super().step_chunk(slots, actions, record)
            if self.crash and any(outcome.error for outcome in outcomes):
                self.crash = set()
            return outcomes

    plain = collected(Collector(FakePool(2, LENGTHS), FakePolicy(), FakeEngine()), tasks(), 0.5)
    shaken = collected(Collector(DyingOnce(2, LENGTHS, crash=[3]), FakePolicy(), FakeEngine()), tasks(), 0.5)
    assert [e.trajectory.num_retries for e in shaken] == [0, 0, 0, 1, 0, 0]
    for ours, theirs in zip(plain, shaken, strict=True):
        assert ours.trajectory.status == theirs.trajectory.status == "ok"
        assert [taken_ids(t).tolist() for t in ours.trajectory.transitions] == [
            taken_ids(t).tolist() for t in theirs.trajectory.transitions
        ]


def test_a_slot_stays_with_its_task_where_it_can():
    pool = FakePool(2, LENGTHS)
    todo = [Task("fake", i, 0, seed=i) for i in (4, 4, 4, 0, 0, 0)]
    collected(Collector(pool, FakePolicy(), FakeEngine()), todo, 0.5)
    assert pool.resets[:2] == [(0, 4), (1, 0)], "the second slot begins with another task"
    assert [task for slot, task in pool.resets if slot == 0][:3] == [4, 4, 4]


def test_an_episode_is_handed_over_as_soon_as_it_ends():
    pool = FakePool(2, LENGTHS)
    episodes = Collector(pool, FakePolicy(), FakeEngine()).episodes(tasks(), Sampling(0.5))
    assert next(episodes)[0] == 1, "the shortest of the first two"
    assert [task for _, task in pool.resets] == [0, 1], "no other has begun"
    assert sorted(index for index, _ in episodes) == [0, 2, 3, 4, 5]


def test_videos_have_the_first_frame_and_one_for_each_step():
    pool = FakePool(2, LENGTHS)
    plan = RecordingPlan(video=lambda task: task.task_id in (0, 3))
    episodes = collected(Collector(pool, FakePolicy(), FakeEngine()), tasks(), 0.5, plan=plan)
    assert [len(e.frames) for e in episodes] == [6, 0, 0, 8, 0, 0]
    assert {int(frame.max()) for frame in episodes[3].frames} == {3}


def test_no_tasks_no_episodes():
    assert collected(Collector(FakePool(2, LENGTHS), FakePolicy(), FakeEngine()), [], 0.5) == []


def test_a_check_is_made_at_every_turn_and_may_stop_it():
    class StopError(Exception):
        pass

    turns: list[int] = []

    def stop() -> None:
        turns.append(len(engine.batches))
        if len(turns) == 3:
            raise StopError

    engine = FakeEngine()
    with pytest.raises(StopError):
        collected(Collector(FakePool(1, [99]), FakePolicy(), engine), tasks(1), 0.5, check=stop)
    assert turns == [1, 2, 3], "also while no episode ends"


@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_an_episode_is_the_same_alone_and_in_any_batch(decoder):
    """Sampled, not greedy: what an episode does depends on its own seed, whatever runs beside it."""
    policy = init_tiny(decoder, seed=3, chunk_length=8 if decoder == "parallel" else 1)
    suite = "tabletop_object"
    todo = [Task(suite, i, i, seed=900 + i) for i in range(3)]

    def run(num_envs: int, chosen: list[Task]) -> dict[int, list[np.ndarray]]:
        enough = 4 if decoder == "autoregressive" else None
        pool = TabletopPool(suite, num_envs, 56, max_steps=enough)
        episodes = collected(Collector(pool, policy, TorchEngine(policy, torch.device("cpu"))), chosen, 1.0)
        return {e.trajectory.task.seed: [taken_ids(t) for t in e.trajectory.transitions] for e in episodes}

    crowd, pairs, alone = run(3, todo), run(2, todo[::-1]), run(1, todo[1:2])
    for seed, tokens in alone.items():
        np.testing.assert_array_equal(np.stack(crowd[seed]), np.stack(tokens))
    for seed in crowd:
        np.testing.assert_array_equal(np.stack(crowd[seed]), np.stack(pairs[seed]))
    assert not np.array_equal(crowd[900][0], crowd[901][0])
    assert not np.array_equal(crowd[900][0], crowd[900][1]), "each decision has a seed of its own"
