"""Batched Gymnasium environments as a pool: partial resets, chunks that end apart, tensors."""

import numpy as np
import pytest
from fakes.gym_batches import TensorReach
from fakes.gym_envs import HIGH, LOW, REACHED, SIZE, Reach, scene_image

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import Record
from vlarl.envs.gym.vector import GymVectorPool
from vlarl.errors import UsageError
from vlarl.types import Task

MASKED = GymConfig(
    env="fakes.gym_batches:vector",
    images=("pixels.front",),
    proprio=("state", "goal"),
    instructions=("go to the right goal", "go to the left goal"),
    task_option="task",
    batched=True,
)
INDEXED = MASKED.model_copy(
    update={"env": "fakes.gym_batches:TensorReach", "instructions": ("go to the goal",), "task_option": None}
)
LIMIT = 20


def build(config: GymConfig, num_envs: int = 3, reward: str = "sparse", limit: int | None = LIMIT) -> GymVectorPool:
    return GymVectorPool(config, EnvConfig(suite="gym", max_steps=limit), num_envs, SIZE, reward)  # type: ignore[arg-type]


@pytest.fixture(params=[MASKED, INDEXED], ids=["mask", "indices"])
def pool(request) -> GymVectorPool:
    return build(request.param)


def task(state: int = 0, task_id: int = 0) -> Task:
    return Task("gym", task_id, state, seed=1)


def to_goal(proprio: np.ndarray, steps: int) -> np.ndarray:
    """[steps, 2] actions of a policy that reach the goal in this many steps; the first ones stay where they are."""
    position, goal = proprio[:2].astype(np.float64), proprio[2:].astype(np.float64)
    moves = []
    while np.abs(goal - position).max() >= REACHED:
        moves.append(np.clip(goal - position, LOW, HIGH))
        position += moves[-1]
        assert len(moves) <= steps
    wanted = np.array([np.zeros(2)] * (steps - len(moves)) + moves)
    return ((wanted - LOW) / (HIGH - LOW) * 2 - 1).astype(np.float32)


def noise(rows: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 0.2, (rows, steps, 2)).astype(np.float32)


def test_the_suite_follows_from_the_batch():
    spec = build(MASKED).spec
    assert spec.name == "gym" and (spec.action_dim, spec.proprio_dim) == (2, 4)
    assert [(t.instruction, t.max_steps) for t in spec.tasks] == [
        ("go to the right goal", LIMIT),
        ("go to the left goal", LIMIT),
    ]
    assert (spec.train_states, spec.eval_states) == (tuple(range(30)), tuple(range(30, 50)))


def test_slots_are_reset_to_their_own_tasks_and_states():
    pool = build(MASKED)
    seen = pool.reset([2, 0, 1], [task(4, 0), task(5, 1), task(4, 1)])
    for observation, (state, task_id) in zip(seen, [(4, 0), (5, 1), (4, 1)], strict=True):
        single = Reach()
        single.reset(seed=state, options={"task": task_id})
        np.testing.assert_array_equal(observation.images, scene_image(single.position, single.goal)[None])
        np.testing.assert_allclose(observation.proprio, np.concatenate([single.position, single.goal]), rtol=1e-6)
        assert observation.instruction == MASKED.instructions[task_id]


def test_a_seed_means_the_same_state_in_any_slot_and_company(pool):
    alone = pool.reset([1], [task(7)])[0]
    a, b, c = pool.reset([0, 1, 2], [task(3), task(9), task(7)])
    np.testing.assert_array_equal(c.images, alone.images)
    np.testing.assert_array_equal(c.proprio, alone.proprio)
    assert not np.array_equal(a.proprio, b.proprio)


def test_an_episode_replays_to_the_bit_in_any_slot(pool):
    def play(slot: int, others: list[int]) -> list[np.ndarray]:
        slots = [slot, *others]
        pool.reset(slots, [task(7), *(task(state) for state, _ in enumerate(others))])
        seen = []
        for chunk in range(3):
            slots = [slot for slot in slots if pool._running[slot]]
            actions = np.concatenate([noise(1, 3, chunk), noise(len(slots) - 1, 3, 50 + slot)])
            outcome = pool.step_chunk(slots, actions)[0]
            seen += [outcome.observation.images, outcome.observation.proprio, outcome.rewards]
        return seen

    for ours, theirs in zip(play(0, []), play(2, [0, 1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_reset_leaves_running_episodes_alone(pool):
    def play(interrupted: bool) -> np.ndarray:
        pool.reset([0, 1], [task(1), task(2)])
        pool.step_chunk([0, 1], noise(2, 3))
        if interrupted:
            pool.reset([1], [task(8)])
        return pool.step_chunk([0, 1], noise(2, 3, 1))[0].observation.proprio

    np.testing.assert_array_equal(play(True), play(False))


def test_ends_within_a_chunk_are_seen_as_they_were_and_the_others_continue(pool):
    first, second = pool.reset([0, 2], [task(1), task(2)])
    late, early = to_goal(first.proprio, 12), to_goal(second.proprio, 9)
    actions = np.stack([late, np.concatenate([early, noise(1, 3)[0]])])
    a, b = pool.step_chunk([0, 2], actions)
    for outcome, steps in ((a, 12), (b, 9)):
        assert outcome.num_executed == steps and outcome.terminated and outcome.success and not outcome.truncated
        assert outcome.rewards.tolist() == [0.0] * (steps - 1) + [1.0] + [0.0] * (12 - steps)
        np.testing.assert_allclose(outcome.observation.proprio[:2], outcome.observation.proprio[2:], atol=0.05)
    np.testing.assert_allclose(b.observation.proprio[2:], second.proprio[2:], err_msg="the goal of this episode")


def test_the_time_limit_and_what_comes_after_it(pool):
    (first,) = pool.reset([1], [task(1)])
    stay = np.repeat(((np.zeros((1, 1, 2)) - LOW) / (HIGH - LOW) * 2 - 1).astype(np.float32), LIMIT + 5, 1)
    (outcome,) = pool.step_chunk([1], stay)
    assert outcome.num_executed == LIMIT and outcome.truncated and not outcome.terminated and not outcome.success
    assert outcome.rewards.shape == (LIMIT + 5,) and outcome.error is None
    np.testing.assert_allclose(outcome.observation.proprio, first.proprio, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"slots \[1\] run no episode"):
        pool.step_chunk([1], stay)
    pool.reset([1], [task(1)])
    assert pool.step_chunk([1], stay[:, :1])[0].num_executed == 1


def test_success_on_the_last_step_is_a_success(pool):
    (first,) = pool.reset([1], [task(1)])
    (outcome,) = pool.step_chunk([1], to_goal(first.proprio, LIMIT)[None])
    assert (outcome.num_executed, outcome.success) == (LIMIT, True)
    assert (outcome.terminated, outcome.truncated) == (True, False)


def test_a_running_slot_that_is_left_out_loses_its_episode(pool):
    pool.reset([0, 1], [task(1), task(2)])
    pool.step_chunk([0], noise(1, 2))
    with pytest.raises(RuntimeError, match=r"slots \[1\] run no episode: reset them before stepping"):
        pool.step_chunk([0, 1], noise(2, 2))


def test_observations_are_not_overwritten(pool):
    (first,) = pool.reset([0], [task(1)])
    kept = first.images.copy(), first.proprio.copy()
    pool.step_chunk([0], noise(1, 6))
    np.testing.assert_array_equal(first.images, kept[0])
    np.testing.assert_array_equal(first.proprio, kept[1])


def test_dense_is_the_batchs_own_reward():
    pool = build(INDEXED, reward="dense")
    pool.reset([0, 2], [task(1), task(2)])
    for outcome in pool.step_chunk([0, 2], noise(2, 1)):
        position, goal = outcome.observation.proprio[:2], outcome.observation.proprio[2:]
        assert outcome.rewards[0] == pytest.approx(-np.abs(position - goal).max(), rel=1e-5)


def test_recorded_frames(pool):
    pool.send_reset([0, 1], [task(1), task(2)], record=Record(frozenset({1})))
    plain, recorded = pool.receive()
    assert plain[1].frames == () and len(recorded[1].frames) == 1 and recorded[1].num_executed == 0
    side = {"mask": 80, "indices": SIZE}["mask" if pool._env.render_mode else "indices"]
    assert recorded[1].frames[0].shape == (side, side, 3)
    pool.send_chunk([0, 1], noise(2, 3), Record(frozenset({0})))
    (slot, outcome), (_, other) = pool.receive()
    assert slot == 0 and len(outcome.frames) == 3 and other.frames == ()
    assert not np.array_equal(outcome.frames[0], outcome.frames[2])


def test_recorded_steps_are_what_is_seen_step_by_step(pool):
    pool.reset([0, 2], [task(1), task(2)])
    plain, recorded = pool.step_chunk([0, 2], noise(2, 4), Record(steps=frozenset({2})))
    assert plain.passed == () and len(recorded.passed) == recorded.num_executed - 1 == 3
    pool.reset([0, 2], [task(1), task(2)])
    for k, passed in enumerate([*recorded.passed, recorded.observation]):
        single = pool.step_chunk([0, 2], noise(2, 4)[:, k : k + 1])[1]
        np.testing.assert_array_equal(passed.images, single.observation.images)
        np.testing.assert_array_equal(passed.proprio, single.observation.proprio)


def test_slots_that_share_one_seed_are_reset_one_by_one():
    pool = build(INDEXED, num_envs=4)
    env = pool._env
    assert isinstance(env, TensorReach)
    before = env.num_resets
    pool.reset([0, 1, 3], [task(1), task(1), task(2)])
    assert env.num_resets == before + 3
    pool.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"env": "Reacher-v5"},
            "gym.env = 'Reacher-v5': gym.batched needs module:factory, a function that takes num_envs",
        ),
        ({"env": "fakes.gym_envs:returns_nothing"}, "returned NoneType, not a gymnasium.vector.VectorEnv"),
        (
            {"kwargs": {"mode": "NextStep"}},
            "its autoreset mode is 'NextStep'; make it with autoreset_mode=AutoresetMode.DISABLED",
        ),
        ({"kwargs": {"colour": 3}}, "making it raised TypeError"),
        (
            {"images": ("pixels.back",)},
            "gym.images = 'pixels.back': the observation's 'pixels' has no 'back'; it has front",
        ),
        ({"success": "info.won"}, "gym.success = 'info.won': info has no 'won'; it has success"),
        ({"env": "fakes.gym_batches:one_too_many"}, "made 4 environments instead of 3"),
        (
            {"env": "fakes.gym_batches:resets_by_name"},
            "metadata['reset_option'] is 'names'; it must be reset_mask or env_idx",
        ),
    ],
)
def test_what_cant_be_used_is_refused_with_the_reason(options, message):
    with pytest.raises(UsageError) as caught:
        build(MASKED.model_copy(update=options))
    assert message in str(caught.value)


def test_a_time_limit_is_needed():
    with pytest.raises(UsageError, match="env.max_steps = null"):
        build(INDEXED, limit=None)


def test_tasks_of_another_suite_and_actions_of_another_length_are_refused(pool):
    with pytest.raises(ValueError, match="this pool runs gym, but the task is of libero_10"):
        pool.reset([0], [Task("libero_10", 0, 0, 0)])
    pool.reset([0], [task()])
    with pytest.raises(ValueError, match=r"actions must be \[1, K, 2\], not \[1, 4, 7\]"):
        pool.step_chunk([0], np.zeros((1, 4, 7), np.float32))


class Faulty(TensorReach):
    """Returns something wrong for slot 1 in its second step."""

    def __init__(self, num_envs: int, fault: str) -> None:
        super().__init__(num_envs)
        self.fault, self.steps = fault, 0

    def reset(self, *, seed=None, options=None):
        self.steps = -1 if self.num_resets < self.num_envs else 0  # the first step of all tries the batch out
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        seen, reward, terminated, truncated, info = super().step(actions)
        self.steps += 1
        if self.steps != 2:
            return seen, reward, terminated, truncated, info
        if self.fault == "raises":
            raise ZeroDivisionError("the gear is broken")
        reward, success, state = reward.clone(), info["success"].float(), seen["state"].clone()
        if self.fault == "reward":
            reward[1] = float("nan")
        if self.fault == "success":
            success[1] = float("nan")
        if self.fault == "state":
            state[1] = float("inf")
        info = {} if self.fault == "key" else {"success": success}
        if self.fault == "rows":
            reward = reward[:1]
        return {**seen, "state": state}, reward, terminated, truncated, info


def faulty(fault: str) -> GymVectorPool:
    config = INDEXED.model_copy(update={"env": f"{__name__}:Faulty", "kwargs": {"fault": fault}})
    return build(config, reward="dense")


@pytest.mark.parametrize(
    ("fault", "reason", "failed"),
    [
        ("reward", "the environment returned NaN as reward, in step 2 in slot 1", {1}),
        ("success", "gym.success = 'info.success': the environment returned nan; it must be True, False, 0 or 1", {1}),
        ("state", "gym.proprio = 'state': the environment returned NaN or infinity", {1}),
        ("key", "gym.success = 'info.success': info has no 'success'; it has nothing, in step 2 in slot", {0, 1, 2}),
    ],
)
def test_a_slot_with_something_wrong_loses_its_episode_and_the_others_continue(fault, reason, failed):
    pool = faulty(fault)
    pool.send_reset([0, 1, 2], [task(state) for state in range(3)])
    assert all(outcome.error is None for _, outcome in pool.receive())
    pool.send_chunk([0, 1, 2], noise(3, 2))
    outcomes = dict(pool.receive())
    for slot, outcome in outcomes.items():
        assert (reason in str(outcome.error)) if slot in failed else outcome.error is None and outcome.num_executed == 2
    pool.send_reset([1], [task(4)])
    ((_, again),) = pool.receive()
    assert again.error is None and again.observation.images.shape == outcomes[1].observation.images.shape


def test_what_the_whole_batch_returns_wrongly_is_an_error_with_its_reason():
    for fault, reason in (
        ("raises", "step raised ZeroDivisionError: the gear is broken"),
        ("rows", "reward as float32"),
    ):
        pool = faulty(fault)
        pool.reset([0, 1, 2], [task(state) for state in range(3)])
        with pytest.raises(UsageError, match=reason):
            pool.step_chunk([0, 1, 2], noise(3, 2))
