"""Rollouts of a fixed length: the segments of an episode are the episode, whatever happens between two iterations."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import NoInputs, taken_ids

from vlarl.decisions import Decisions, Sampling
from vlarl.envs.base import NOTHING, LockstepPool, Record, SuiteSpec, TaskSpec, started
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.openvla.decisions import token_decisions, token_ids
from vlarl.rewards.outcome import DenseReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.segments import Segments, fingerprint
from vlarl.rollout.statistics import rollout_metrics
from vlarl.rollout.tasks import derive_seed
from vlarl.types import ChunkOutcome, Observation, Task, Trajectory, pixel_digest

CHUNK = 2
LENGTHS = [5, 23, 2, 14, 9]  # of the tasks' episodes, in steps
SAMPLING = Sampling(1.0)


class WalkPool(LockstepPool):
    """The state of a slot is the sum of its actions, so that it can only be reached by them.

    A batched pool moves all its slots at every step, as GPU simulators do: one that is not sent a chunk loses its
    episode. `shuffled` slots come back one by one, the last first.
    """

    def __init__(self, num_envs: int, batched: bool = False, shuffled: bool = False, drift: float = 0.0) -> None:
        super().__init__()
        self.spec = SuiteSpec("walk", tuple(TaskSpec(i, str(i), 99) for i in range(len(LENGTHS))), (0,), (1,), (1,))
        self.num_envs, self.batched, self.shuffled = num_envs, batched, shuffled
        self.lockstep = not shuffled
        self.drift = drift  # by which an episode differs from the one before it
        self.slots: dict[int, list[float]] = {}  # task, step, position
        self.resets: list[int] = []  # task ids
        self.fails_at: set[tuple[int, int]] = set()  # task and step: once, before its outcome
        self.is_broken = False

    def observe(self, slot: int) -> Observation:
        task, step, position = self.slots[slot]
        proprio = np.array([position, *[0] * 7], np.float32)
        return Observation(np.full((1, 1, 1, 3), step, np.uint8), proprio, str(int(task)))

    def send_reset(self, slots: Sequence[int], tasks: Sequence[Task], record: Record = NOTHING) -> None:
        for slot, task in zip(slots, tasks, strict=True):
            self.slots[slot] = [task.task_id, 0, task.seed % 7 + self.drift * len(self.resets)]
            self.resets.append(task.task_id)
            error = "it does not start" if self.is_broken else None
            self._outcomes.append((slot, started(self.observe(slot), error=error)))

    def send_chunk(self, slots: Sequence[int], actions: np.ndarray, record: Record = NOTHING) -> None:
        if self.batched:
            self.slots = {slot: state for slot, state in self.slots.items() if slot in slots}
        for slot, chunk in zip(slots, actions, strict=True):
            self._outcomes.append((slot, self._step(slot, chunk)))

    def _step(self, slot: int, chunk: np.ndarray) -> ChunkOutcome:
        assert slot in self.slots, "the slot has lost its episode"
        task, step, _ = self.slots[slot]
        executed = int(min(CHUNK, LENGTHS[int(task)] - step))
        self.slots[slot][1] += executed
        self.slots[slot][2] += float(chunk[:executed].sum())
        done = self.slots[slot][1] == LENGTHS[int(task)]
        rewards = np.zeros(CHUNK, np.float32)
        rewards[:executed] = chunk[:executed, 0] / 64
        outcome = ChunkOutcome(
            rewards,
            executed,
            done and task % 2 == 0,
            done and task % 2 == 1,
            done and task % 2 == 0,
            self.observe(slot),
        )
        if (key := (int(task), int(step))) in self.fails_at:
            self.fails_at.remove(key)
            outcome = replace(outcome, terminated=False, truncated=False, success=False, error="the simulator died")
        if done or outcome.error:
            del self.slots[slot]
        return outcome

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        if not self._outcomes:
            raise RuntimeError("nothing was sent that could be received")
        if self.shuffled:
            return [self._outcomes.pop()]
        return super().receive()

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        raise NotImplementedError

    step_chunk = frame = close = reset


class WalkPolicy:
    """Reads nothing; its actions are its tokens."""

    num_steps = CHUNK

    def process(self, observations: Sequence[Observation]) -> NoInputs:
        return NoInputs(torch.tensor([float(o.proprio[0]) for o in observations]))

    def act(self, decisions: Decisions) -> list[np.ndarray]:
        return list(token_ids(decisions).reshape(-1, CHUNK, 1).float().numpy())


class WalkEngine:
    """Tokens by seed, position and version: an episode follows from all three."""

    version = 0

    def generate(self, inputs: NoInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        rows = [
            [derive_seed(seed, int(position), self.version, k) % 50 for k in range(CHUNK)]
            for seed, position in zip(seeds, inputs.nothing.tolist(), strict=True)
        ]
        ids = torch.tensor(rows)
        return token_decisions(ids, -ids.float(), action_dim=1).of_version(self.version)


class Tasks:
    """Episode n has the task n modulo 5."""

    def get_episodes(self, indices: Sequence[int]) -> list[Task]:
        return [Task("walk", n % len(LENGTHS), 0, seed=50 + n, group=n) for n in indices]


def segments_of(pool: WalkPool, num_steps: int = 6, retries: int = 3) -> Segments:
    collector = Collector(pool, WalkPolicy(), WalkEngine(), retries)  # type: ignore[arg-type]
    return Segments(collector, Tasks(), num_steps)  # type: ignore[arg-type]


def played(segments: Segments, iterations: int, between=lambda: None) -> list[list[Trajectory]]:
    rollouts = []
    for _ in range(iterations):
        rollouts.append(segments.collect(SAMPLING))
        segments.credit(DenseReward().score_all(rollouts[-1]))
        between()
    return rollouts


def content(trajectory: Trajectory) -> tuple:
    """Everything of a trajectory that is trained on or reported, as values that can be compared."""
    decisions = [
        (fingerprint(t.observation), taken_ids(t).tolist(), t.rewards.tolist(), t.num_executed, t.version)
        for t in trajectory.transitions
    ]
    end = (trajectory.terminated, trajectory.truncated, trajectory.success, trajectory.continues, trajectory.earlier)
    return trajectory.task, decisions, fingerprint(trajectory.final_observation), end, trajectory.policy_version


def contents(rollouts: list[list[Trajectory]]) -> list[list[tuple]]:
    return [[content(t) for t in rollout] for rollout in rollouts]


def by_episode(rollouts: list[list[Trajectory]]) -> dict[Task, list[Trajectory]]:
    found: dict[Task, list[Trajectory]] = {}
    for trajectory in (t for rollout in rollouts for t in rollout):
        found.setdefault(trajectory.task, []).append(trajectory)
    return found


@pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 1), (1, 6), (3, 5), (3, 6), (4, 64)])
def test_the_segments_of_an_episode_are_the_episode(num_envs, num_steps):
    """No transition is lost or used twice over the borders of iterations: against episodes that run to their end."""
    rollouts = played(segments_of(WalkPool(num_envs), num_steps), 12)
    due = -(-num_steps // CHUNK) * num_envs
    assert [sum(len(t.transitions) for t in rollout) for rollout in rollouts] == [due] * 12
    episodes = by_episode(rollouts)
    whole = Collector(WalkPool(2), WalkPolicy(), WalkEngine())  # type: ignore[arg-type]
    tasks = list(episodes)
    expected = {tasks[i]: e.trajectory for i, e in whole.episodes(tasks, SAMPLING)}
    num_cut = 0
    for task, parts in episodes.items():
        ended = not parts[-1].continues
        assert all(part.continues for part in parts[:-1])
        pieces = [piece for part in parts for piece in content(part)[1]]
        assert pieces == content(expected[task])[1][: len(pieces)]
        assert not ended or len(pieces) == len(expected[task].transitions)
        for before, after in zip(parts, parts[1:], strict=False):
            assert fingerprint(before.final_observation) == fingerprint(after.transitions[0].observation)
            assert after.earlier.num_steps == before.episode_length
            assert after.earlier.reward == before.episode_return == after.earlier.progress
        if ended:
            assert parts[-1].episode_length == LENGTHS[task.task_id]
            assert parts[-1].episode_return == pytest.approx(expected[task].env_return, abs=1e-6)
            assert (parts[-1].terminated, parts[-1].success) == (expected[task].terminated, expected[task].success)
        num_cut += len(parts) - 1
    assert num_cut > 0 and sum(not t.continues for r in rollouts for t in r) > 0, "some were cut, and some ended"


def test_each_slot_has_episodes_of_its_own():
    rollouts = played(segments_of(WalkPool(3), 10), 6)
    groups = [[t.task.group for t in rollout] for rollout in rollouts]
    assert groups[:2] == [[0, 3, 1, 2, 5, 8], [3, 1, 8]], "by slot, and in a slot by time"


def test_segments_do_not_depend_on_which_slot_is_faster():
    calm, hurried = (played(segments_of(WalkPool(3, shuffled=shuffled)), 8) for shuffled in (False, True))
    assert contents(calm) == contents(hurried)


@pytest.mark.parametrize("pool", [{}, {"batched": True}, {"shuffled": True}], ids=["arrays", "batched", "processes"])
def test_an_evaluation_in_between_changes_nothing(pool):
    calm = played(segments_of(WalkPool(3, **pool)), 8)
    segments = segments_of(WalkPool(3, **pool))

    def evaluate() -> None:
        assert len(list(segments.collector.episodes([Task("walk", i, 1, seed=i) for i in range(4)], SAMPLING))) == 4

    disturbed = played(segments, 8, evaluate)
    assert contents(disturbed) == contents(calm)
    assert segments.num_restarted == 0


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_restored_run_collects_the_same_segments(evaluated):
    """From what JSON can hold, in new environments."""
    first = segments_of(WalkPool(3))
    before = played(first, 4)
    saved = json.loads(json.dumps(first.state()))
    after = played(first, 5)
    second = segments_of(WalkPool(3))
    second.restore(saved)
    if evaluated:
        list(second.collector.episodes([Task("walk", 2, 1, seed=3)], SAMPLING))
    assert contents(played(second, 5)) == contents(after)
    assert any(part.earlier.num_steps for part in after[0]), "episodes went on that had begun before"
    assert before


def test_each_decision_keeps_the_version_of_its_weights():
    segments = segments_of(WalkPool(2))

    def update() -> None:
        segments.collector.engine.version += 1  # type: ignore[misc]

    rollouts = played(segments, 5, update)
    for iteration, rollout in enumerate(rollouts):
        assert {t.version for part in rollout for t in part.transitions} == {iteration}
    mixed = [parts for parts in by_episode(rollouts).values() if len(parts) > 2]
    assert mixed and all(
        [part.policy_version for part in parts] == sorted({part.policy_version for part in parts}) for parts in mixed
    )


def test_an_episode_that_does_not_come_back_starts_again_and_is_counted(caplog):
    segments = segments_of(WalkPool(2, drift=0.5))
    (first,) = played(segments, 1)
    cut = [part for part in first if part.continues]
    list(segments.collector.episodes([Task("walk", 2, 1, seed=3)], SAMPLING))
    (second,) = played(segments, 1)
    assert segments.num_restarted == len(cut) > 0
    again = [part for part in second if part.task in {part.task for part in cut}]
    assert all(part.earlier.num_steps == 0 and part.transitions[0].observation.images.max() == 0 for part in again)
    assert "did not come back to its step 6: it starts again from its beginning" in caplog.text


@pytest.mark.parametrize("pool", [{}, {"batched": True}, {"shuffled": True}], ids=["arrays", "batched", "processes"])
def test_an_episode_whose_simulator_fails_while_it_is_brought_back_is_brought_back_again(pool, caplog):
    calm = played(segments_of(WalkPool(3, **pool)), 8)
    disturbed = WalkPool(3, **pool)
    segments = segments_of(disturbed)
    before = played(segments, 2)
    (longest,) = [part for part in before[1] if part.continues and part.task.task_id == 1]
    disturbed.fails_at = {(1, 2), (1, 4)}  # steps of its first segment: once each
    list(segments.collector.episodes([Task("walk", 2, 1, seed=3)], SAMPLING))
    after = played(segments, 6)
    assert not disturbed.fails_at and contents(before + after) == contents(calm)
    assert [part.num_retries for part in after[0] if part.task == longest.task] == [2]
    assert caplog.text.count("it is run again: the simulator died") == 2 and "did not come back" not in caplog.text


def test_an_episode_whose_simulator_always_fails_while_it_is_brought_back_starts_again(caplog):
    pool = WalkPool(2)
    segments = segments_of(pool, retries=0)
    played(segments, 1)
    list(segments.collector.episodes([Task("walk", 2, 1, seed=3)], SAMPLING))
    pool.fails_at = {(1, 2)}
    (second,) = played(segments, 1)
    (again,) = [part for part in second if part.task.task_id == 1]
    assert again.earlier.num_steps == 0 and segments.num_restarted == 1
    assert "given up after 1 attempt: the simulator died" in caplog.text


class HoldingPool(WalkPool):
    """After a failure the slot's worker is replaced, and its reset takes a while."""

    held = 0  # how often nothing was returned

    def receive(self) -> list[tuple[int, ChunkOutcome]]:
        if self.resets.count(0) > 1 and self.held < 3:
            self.held += 1
            return []
        return super().receive()


def test_in_lockstep_no_slot_goes_ahead_while_another_one_is_awaited():
    """Batches must not depend on how long a replacement takes."""
    sizes = []

    class Watched(WalkEngine):
        def generate(self, inputs: NoInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
            sizes.append(len(seeds))
            return super().generate(inputs, sampling, seeds)

    pool = HoldingPool(2)
    pool.fails_at = {(0, 2)}
    tasks = [Task("walk", 0, 0, seed=1), Task("walk", 1, 0, seed=2)]
    collector = Collector(pool, WalkPolicy(), Watched())  # type: ignore[arg-type]
    assert len(list(collector.episodes(tasks, SAMPLING))) == 2
    assert pool.held == 3 and sizes[:5] == [2] * 5, "two before the failure, three decisions of the short episode"


def test_an_episode_whose_simulator_failed_starts_again_without_what_was_collected():
    """Task 0 fails at the third decision of the first iteration, task 1 in the middle of its second segment."""
    pool = WalkPool(1)
    segments = segments_of(pool, 6)
    pool.fails_at = {(0, 4), (1, 8)}
    rollouts = played(segments, 5)
    steps = [
        [(part.task.task_id, [int(t.observation.images.max()) for t in part.transitions]) for part in rollout]
        for rollout in rollouts
    ]
    assert steps == [[], [(0, [0, 2, 4])], [(1, [0, 2, 4])], [(1, [0])], [(1, [2, 4, 6])]]
    assert [part.earlier.num_steps for rollout in rollouts for part in rollout] == [0, 0, 0, 2]
    assert [part.num_retries for rollout in rollouts for part in rollout] == [1, 0, 1, 1]


def test_a_slot_that_does_not_work_is_left_alone_until_the_next_iteration():
    pool = WalkPool(2)
    pool.is_broken = True
    segments = segments_of(pool, retries=1)
    with pytest.raises(VlarlError, match=r"none of 2 episodes of walk could be run"):
        segments.collect(SAMPLING)
    assert len(pool.resets) == 2 * 2, "two attempts of one episode in each slot"


def test_the_other_slots_go_on_without_it():
    pool = WalkPool(2)
    segments = segments_of(pool, retries=0)
    pool.fails_at = {(1, 2)}
    (rollout,) = played(segments, 1)
    assert [(part.task.task_id, part.status, len(part.transitions)) for part in rollout] == [
        (0, "ok", 3),
        (1, "crashed", 1),
    ]
    assert [part.task.task_id for part in played(segments, 1)[0]] == [2, 4, 3], "both have the episodes that follow"


def test_another_number_of_environments_is_refused_with_the_remedy():
    first = segments_of(WalkPool(3))
    played(first, 1)
    with pytest.raises(UsageError, match=r"resume with --env.num_envs 3"):
        segments_of(WalkPool(2)).restore(first.state())


@pytest.mark.parametrize(
    "damage",
    [
        {"num_begun": None},
        {"num_begun": [0, 0, "x"]},
        {"episodes": [{}]},
        {"episodes": 3},
    ],
)
def test_a_damaged_state_is_refused(damage):
    first = segments_of(WalkPool(3))
    played(first, 1)
    with pytest.raises((KeyError, TypeError, ValueError)):
        segments_of(WalkPool(3)).restore(first.state() | damage)


def test_metrics_are_of_the_episodes_that_ended_and_speed_of_all_steps():
    segments = segments_of(WalkPool(1), 4)
    rollouts = played(segments, 4)
    ended = [[part for part in rollout if not part.continues] for rollout in rollouts]
    assert [len(each) for each in ended] == [0, 1, 0, 0]
    none = rollout_metrics(ended[0], 2.0, rollouts[0])
    assert not {"rollout/success_rate", "rollout/mean_return", "rollout/mean_length"} & none.keys()
    assert none["rollout/env_steps_per_s"] == 2.0 and none["rollout/num_segments"] == 1
    one = rollout_metrics(ended[1], 2.0, rollouts[1])
    assert one["rollout/mean_length"] == 5 and one["rollout/success_rate"] == 1.0
    total = sum(float(t.rewards.sum()) for rollout in rollouts[:2] for part in rollout[:1] for t in part.transitions)
    assert one["rollout/mean_return"] == pytest.approx(total)


def test_an_observation_is_known_again_without_its_pixels():
    """On a cluster they stay with the environments, and their digest comes along."""
    images = np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3), dtype=np.uint8)
    seen = Observation(images, np.zeros(8, np.float32), "reach")
    known = replace(seen.without_images(), digest=pixel_digest(images))
    assert fingerprint(known) == fingerprint(seen) != fingerprint(replace(known, digest=pixel_digest(images[:, ::-1])))
