"""A Gymnasium environment as a SingleEnv: where values are found, how images and actions are converted."""

import gymnasium
import numpy as np
import pytest
import torch
from fakes.gym_envs import HIGH, LOW, SIZE, Reach, Shown, scene_image
from gymnasium import spaces

from vlarl.config.schema import GymConfig
from vlarl.envs.gym.env import GymEnv
from vlarl.envs.gym.reading import ActionMap, to_image
from vlarl.errors import UsageError
from vlarl.types import Task

REACH = GymConfig(
    env="fakes.gym_envs:Reach",
    images=("pixels.front",),
    proprio=("state", "goal"),
    instructions=("go to the right goal", "go to the left goal"),
    task_option="task",
)


def task(state: int = 0, task_id: int = 0, seed: int = 7) -> Task:
    return Task("gym", task_id, state, seed)


def shown(observation: object, **options: object) -> GymEnv:
    options = {"images": ("pixels",), "success": "info.deep.success", **options}
    env = GymEnv(Shown(observation), GymConfig(**options), 4, "sparse")  # type: ignore[arg-type]
    env.reset(task())
    return env


def policy_action(*wanted: float) -> np.ndarray:
    """The policy's action that gives Reach these values."""
    return ((np.array(wanted) - LOW) / (HIGH - LOW) * 2 - 1).astype(np.float32)


def walk(env: GymEnv, inner: Reach) -> list[np.ndarray]:
    """Actions that lead to the goal."""
    actions = []
    while np.abs(inner.goal - inner.position).max() >= 0.05:
        actions.append(policy_action(*np.clip(inner.goal - inner.position, -0.1, 0.2)))
        last = env.step(actions[-1])
        assert len(actions) < 100
    assert last.success
    return actions


def test_an_episode_from_its_seed_to_its_goal():
    inner = Reach()
    env = GymEnv(inner, REACH, SIZE, "sparse")
    env.reset(task(state=3))
    expected = Reach()
    expected.reset(seed=3, options={"task": 0})
    first = env.observe()
    np.testing.assert_array_equal(first.images, scene_image(expected.position, expected.goal)[None])
    np.testing.assert_allclose(first.proprio, np.concatenate([expected.position, expected.goal]), rtol=1e-6)
    assert first.proprio.dtype == np.float32 and first.instruction == "go to the right goal"
    start = inner.position.copy()
    miss = env.step(policy_action(-0.1, -0.05))
    np.testing.assert_allclose(inner.position, np.clip(start + [-0.1, -0.05], 0, 1), atol=1e-6)
    assert (miss.reward, miss.terminated, miss.truncated, miss.success) == (0.0, False, False, False)
    walk(env, inner)
    last = env.step(policy_action(0.0, 0.0))
    assert (last.reward, last.terminated, last.truncated, last.success) == (1.0, True, False, True)


def test_the_task_is_chosen_by_its_option_and_has_its_instruction():
    env = GymEnv(Reach(), REACH, SIZE, "sparse")
    for state in range(5):
        env.reset(task(state, task_id=1))
        assert env.observe().proprio[2:].max() <= 0.4, "the goal of task 1 is on the left"
        assert env.observe().instruction == "go to the left goal"


def test_an_instruction_that_info_tells():
    env = GymEnv(Reach(), REACH.model_copy(update={"instructions": ("info.instruction",)}), SIZE, "sparse")
    env.reset(task(task_id=1))
    assert env.observe().instruction == "go to the left goal"
    env.step(np.zeros(2, np.float32))
    assert env.observe().instruction == "go to the left goal"


def test_initial_states_are_seeds_and_the_episodes_seed_changes_nothing():
    env = GymEnv(Reach(), REACH, SIZE, "sparse")

    def first(state: int, seed: int) -> np.ndarray:
        env.reset(task(state, seed=seed))
        return env.observe().proprio

    np.testing.assert_array_equal(first(4, 1), first(4, 2))
    assert not np.array_equal(first(4, 1), first(5, 1))


def test_dense_is_the_environments_own_reward():
    inner = Reach()
    env = GymEnv(inner, REACH, SIZE, "dense")
    env.reset(task())
    step = env.step(policy_action(0.1, 0.1))
    assert step.reward == pytest.approx(-np.abs(inner.position - inner.goal).max())


def test_success_ends_an_episode_that_the_environment_would_continue():
    env = shown({"pixels": np.zeros((4, 4, 3), np.uint8)})
    steps = [env.step(np.zeros(2, np.float32)) for _ in range(3)]
    assert [(s.reward, s.terminated, s.success) for s in steps] == [
        (0, False, False),
        (0, False, False),
        (1, True, True),
    ]


@pytest.mark.parametrize(
    ("ended", "cut", "outcome"),
    [
        (True, False, (True, False, True)),
        (False, True, (False, True, False)),
        (True, True, (True, False, True)),  # never both
    ],
)
def test_success_by_termination_and_ends_are_kept_apart(ended, cut, outcome):
    class Ends(Shown):
        def step(self, action):
            return self.observation, 0.0, ended, cut, {}

    env = GymEnv(
        Ends({"pixels": np.zeros((4, 4, 3))}), GymConfig(images=("pixels",), success="terminated"), 4, "sparse"
    )
    env.reset(task())
    step = env.step(np.zeros(2, np.float32))
    assert (step.terminated, step.truncated, step.success) == outcome


def test_an_end_without_success_is_an_end_for_good():
    class Falls(Shown):
        def step(self, action):
            return self.observation, -5.0, True, False, {"deep": {"success": False}}

    env = GymEnv(
        Falls(np.zeros((4, 4, 3))), GymConfig(images=("observation",), success="info.deep.success"), 4, "dense"
    )
    env.reset(task())
    step = env.step(np.zeros(2, np.float32))
    assert (step.reward, step.terminated, step.truncated, step.success) == (-5.0, True, False, False)


def test_images_of_all_kinds_become_the_same_one():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    alpha = np.concatenate([image, np.full((5, 7, 1), 9, np.uint8)], axis=2)
    for kind in (
        image,
        np.moveaxis(image, 2, 0),
        image / 255,
        (image / 255).astype(np.float32),
        image.astype(np.int64),
        alpha,
    ):
        np.testing.assert_array_equal(to_image(kind, "pixels"), image)
    np.testing.assert_array_equal(to_image(torch.from_numpy(image).permute(2, 0, 1), "pixels"), image)
    assert (to_image(np.full((4, 4, 3), 0.999), "pixels") == 255).all(), "rounded, not cut off"
    grey = image[..., 0]
    np.testing.assert_array_equal(to_image(grey, "pixels"), np.stack([grey] * 3, axis=2))
    np.testing.assert_array_equal(to_image(grey[None], "pixels"), np.stack([grey] * 3, axis=2))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            np.full((4, 4, 3), 200.0),
            r"gym.images = 'pixels': is float64 from 200 to 200; fractions go from 0 to 1, whole",
        ),
        (np.full((4, 4, 3), -1.0), r"is float64 from -1 to -1"),
        (np.full((4, 4, 3), np.nan), r"is float64 from nan to nan"),
        (np.full((4, 4, 3), 300), r"is int64 from 300 to 300"),
        (np.zeros((6, 6, 5), np.uint8), r"is uint8\[6, 6, 5\]; an image is \[H, W, 3\] or \[3, H, W\]"),
        (np.zeros((0, 4, 3), np.uint8), r"is uint8\[0, 4, 3\]; an image is"),
        (np.zeros(12), r"is float64\[12\]; an image is"),
    ],
)
def test_what_is_not_an_image_is_refused(image, message):
    with pytest.raises(UsageError, match=message):
        shown({"pixels": image}).observe()


def test_images_are_resized_to_the_policys_size():
    halves = np.zeros((8, 16, 3), np.uint8)
    halves[:, 8:] = 200
    seen = shown({"pixels": halves}).observe().images
    assert seen.shape == (1, 4, 4, 3)
    assert (seen[0, :, 0] < 10).all() and (seen[0, :, 3] > 190).all()


def test_observations_are_copies():
    image, values = np.zeros((4, 4, 3), np.uint8), np.zeros(3, np.float32)
    env = shown({"pixels": image, "state": values}, proprio=("state",))
    seen, frame = env.observe(), env.frame()
    image[:], values[:] = 9, 9
    assert seen.images.max() == 0 and seen.proprio.max() == 0 and frame.max() == 0


def test_state_is_put_together_in_order_and_zeros_without_paths():
    observation = {"pixels": np.zeros((4, 4, 3)), "arm": {"joints": [[1.0, 2.0], [3.0, 4.0]], "closed": True}, "t": 7}
    seen = shown(observation, proprio=("t", "arm.joints", "arm.closed")).observe()
    assert seen.proprio.tolist() == [7, 1, 2, 3, 4, 1]
    assert shown(observation).observe().proprio.tolist() == [0] * 8


def test_paths_into_info_and_to_a_whole_observation():
    env = GymEnv(Shown(np.array([3.0, 4.0])), GymConfig(proprio=("observation", "info.deep.success")), 4, "sparse")
    env.reset(task())
    env._env.render = lambda: np.zeros((4, 4, 3), np.uint8)  # type: ignore[method-assign]
    env.reset(task())
    assert env.observe().proprio.tolist() == [3, 4, 0]
    goal_env = shown({"observation": np.array([5.0]), "pixels": np.zeros((4, 4, 3))}, proprio=("observation",))
    assert goal_env.observe().proprio.tolist() == [5], "a key of that name comes first"


@pytest.mark.parametrize(
    ("observation", "options", "message"),
    [
        ({"camera": 1, "arm": 2}, {}, "gym.images = 'pixels': the observation has no 'pixels'; it has camera, arm"),
        (
            {"pixels": {"rgb": 1}},
            {"images": ("pixels.depth",)},
            "the observation's 'pixels' has no 'depth'; it has rgb",
        ),
        (np.zeros(3), {}, r"the observation is float64\[3\], not a dict; `observation` is all of it"),
        ({"pixels": np.zeros((4, 4, 3))}, {"images": ("pixels.rgb",)}, r"'pixels' is float64\[4, 4, 3\], not a dict"),
        ({"pixels": np.zeros((4, 4, 3)), "s": "left"}, {"proprio": ("s",)}, "gym.proprio = 's': is <U4"),
    ],
)
def test_paths_that_lead_nowhere_say_what_is_there(observation, options, message):
    with pytest.raises(UsageError, match=message):
        shown(observation, **options).observe()


def test_a_success_that_is_missing_or_many_is_refused():
    observation = {"pixels": np.zeros((4, 4, 3))}
    with pytest.raises(UsageError, match="gym.success = 'info.won': info has no 'won'; it has deep"):
        shown(observation, success="info.won").step(np.zeros(2, np.float32))
    with pytest.raises(UsageError, match=r"gym.success = 'pixels': the environment returned float64\[4, 4, 3\]; it"):
        shown(observation, success="pixels").step(np.zeros(2, np.float32))


def env_returning(success: object = 0, terminated: object = False, truncated: object = False) -> GymEnv:
    """An environment that returns these for every step."""
    env = GymEnv(Shown({"pixels": np.zeros((4, 4, 3))}), GymConfig(images=("pixels",)), 4, "sparse")
    env.reset(task())
    result = ({"pixels": np.zeros((4, 4, 3))}, 0.0, terminated, truncated, {"success": success})
    env._env.step = lambda action: result  # type: ignore[method-assign]
    return env


@pytest.mark.parametrize("value", [True, 1, 1.0, np.True_, np.float32(1), np.array([1]), torch.tensor([True]), [[1]]])
def test_success_is_true_false_0_or_1(value):
    assert env_returning(value).step(np.zeros(2, np.float32)).success
    assert not env_returning(np.zeros_like(np.asarray(value))).step(np.zeros(2, np.float32)).success


@pytest.mark.parametrize(
    ("value", "named"),
    [("no", "'no'"), ("", "''"), (None, "None"), (float("nan"), "nan"), (2, "2"), (0.5, "0.5"), (-1, "-1"), ({}, "{}")]
    + [([1, 0], r"int64\[2\]"), ([], r"float64\[0\]"), ([[1], [1, 2]], r"\[\[1\], \[1, 2\]\]"), ("x" * 99, "'x{58}…")],
)
def test_any_other_success_is_refused_with_its_value(value, named):
    with pytest.raises(UsageError, match=f"gym.success = 'info.success': the environment returned {named}; it must be"):
        env_returning(value).step(np.zeros(2, np.float32))


def test_the_ends_of_an_episode_are_truth_values_too():
    with pytest.raises(UsageError, match="terminated: the environment returned 'False'; it must be True, False"):
        env_returning(terminated="False").step(np.zeros(2, np.float32))
    with pytest.raises(UsageError, match="truncated: the environment returned nan; it must be True, False"):
        env_returning(truncated=float("nan")).step(np.zeros(2, np.float32))
    step = env_returning(terminated=np.array([1]), truncated=np.True_).step(np.zeros(2, np.float32))
    assert step.terminated and not step.truncated


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_state_that_is_not_finite_is_named_by_its_path(value):
    observation = {"pixels": np.zeros((4, 4, 3)), "arm": np.array([0.0, value])}
    with pytest.raises(UsageError, match="gym.proprio = 'arm': the environment returned NaN or infinity"):
        shown(observation, proprio=("arm",)).observe()


def test_actions_are_chosen_stretched_and_clipped():
    box = spaces.Box(np.array([-0.1, 0.0, -np.inf, 1.0]), np.array([0.3, 10.0, np.inf, np.inf]), dtype=np.float64)
    actions = ActionMap(box, (6, 0, 2, 1))
    given = np.array([0.5, 3.0, 40.0, 0.0, 0.0, 0.0, -1.0], np.float32)
    kept = given.copy()
    assert actions.action_dim == 7
    np.testing.assert_allclose(actions(given), [-0.1, 7.5, 40.0, 3.0])
    np.testing.assert_array_equal(given, kept)
    np.testing.assert_allclose(actions(np.full(7, 9.0, np.float32))[:2], [0.3, 10.0])
    np.testing.assert_allclose(actions(np.zeros(7, np.float32)), [0.1, 5.0, 0.0, 0.0])
    batch = actions(np.stack([given, -given]))
    np.testing.assert_allclose(batch, np.stack([actions(given), actions(-given)]))


def test_the_length_of_actions_is_the_environments_or_the_policys():
    box = spaces.Box(-1.0, 1.0, (3,))
    assert ActionMap(box, None).action_dim == 3
    assert ActionMap(box, (0, 1, 2)).action_dim == 7, "with gym.actions the policy has 7 dimensions"
    assert ActionMap(box, (0, 1, 13)).action_dim == 14
    two_arms = ActionMap(spaces.Box(-1.0, 1.0, (2, 3), np.float64), None)
    np.testing.assert_allclose(
        two_arms(np.arange(6, dtype=np.float32) / 10), [[0, 0.1, 0.2], [0.3, 0.4, 0.5]], atol=1e-7
    )
    with pytest.raises(ValueError, match="must have 3 dimensions, not 7"):
        ActionMap(box, None)(np.zeros(7, np.float32))


def test_action_spaces_that_no_policy_can_act_in():
    with pytest.raises(UsageError, match=r"its action space is Discrete\(4\); policies give continuous actions"):
        ActionMap(spaces.Discrete(4), None)
    with pytest.raises(UsageError, match="its action space is Box"):
        ActionMap(spaces.Box(0, 5, (2,), np.int64), None)
    with pytest.raises(UsageError, match=r"gym.actions = \[0, 1\]: names 2 dimensions, the environment takes 3"):
        ActionMap(spaces.Box(-1.0, 1.0, (3,)), (0, 1))


def test_frames_are_rendered_in_the_environments_own_size():
    env = GymEnv(Reach(), REACH, 8, "sparse")
    env.reset(task())
    assert env.frame().shape == (80, 80, 3) and env.observe().images.shape == (1, 8, 8, 3)
    unrendered = GymEnv(Reach(render_mode=None), REACH, 8, "sparse")
    unrendered.reset(task())
    assert unrendered.frame().shape == (SIZE, SIZE, 3)


def test_nothing_is_seen_before_a_reset():
    with pytest.raises(RuntimeError, match="reset the environment first"):
        GymEnv(Reach(), REACH, 8, "sparse").observe()


def test_an_environment_of_gymnasium_itself(monkeypatch):
    config = GymConfig(
        env="Reacher-v5",
        kwargs={"width": 32, "height": 32},
        proprio=("observation",),
        instructions=("reach the ball",),
        success="terminated",
        actions=(0, 1),
    )
    from vlarl.envs.gym.env import GymFactory, gym_spec

    monkeypatch.setenv("MUJOCO_GL", "egl")
    spec = gym_spec(config, None)
    assert (spec.action_dim, spec.proprio_dim, spec.tasks[0].max_steps) == (7, 10, 50)
    env = GymFactory(spec, (1, 16, 16, 3), config, None, "dense").build()
    stock = gymnasium.make("Reacher-v5")
    stock_first, _ = stock.reset(seed=31)
    env.reset(task(31))
    np.testing.assert_allclose(env.observe().proprio, stock_first, rtol=1e-6)
    assert env.observe().images.std() > 5
    stock_next, reward, *_ = stock.step(np.array([0.25, -0.5], np.float32))
    assert env.step(np.array([0.25, -0.5, 9, 9, 9, 9, 9], np.float32)).reward == pytest.approx(reward)
    np.testing.assert_allclose(env.observe().proprio, stock_next, rtol=1e-6)
    env.close()
