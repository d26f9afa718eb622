"""Images of the tabletop world: everything relevant is visible."""

import numpy as np
import pytest

from vlarl.envs.tabletop.objects import KIND_IDS
from vlarl.envs.tabletop.render import AGENT_WIDTH, Renderer
from vlarl.envs.tabletop.tasks import SUITES, initial_state
from vlarl.envs.tabletop.world import TabletopWorld

ROW = np.array([0])


def world_with(suite: str, task_id: int, index: int = 0) -> TabletopWorld:
    world = TabletopWorld(1)
    world.reset(0, initial_state(suite, task_id, index))
    return world


def image(world: TabletopWorld, size: int = 64) -> np.ndarray:
    return Renderer(world, "agent", size).render(ROW)[0].astype(int)


@pytest.mark.parametrize("size", [56, 64, 224])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_third_of_a_pixel_shows(size, axis):
    world = world_with("tabletop_object", 7)
    obj = world.goal_object[0, 0]
    before = image(world, size)
    world.position[0, obj, axis] += 0.4 * AGENT_WIDTH / size
    change = np.abs(image(world, size) - before).max()
    assert change >= 8
    world.eef[0, axis] += 0.4 * AGENT_WIDTH / size
    assert (image(world, size) != before).any()


def test_brightness_moves_with_the_object_to_a_fraction_of_a_pixel():
    """The centre of the changed pixels moves as far as the object."""
    world = world_with("tabletop_spatial", 0)
    bowl = world.goal_object[0, 0]
    world.eef[0] = (0.3, 0.3, 0.3)
    size = 64
    world.kind[0, bowl] = 0
    empty = image(world, size)
    world.kind[0, bowl] = KIND_IDS["bowl"]
    centres = []
    x = world.position[0, bowl, 0]
    shifts = np.linspace(0, 3, 13)
    for shift in shifts:
        world.position[0, bowl, 0] = x + shift * AGENT_WIDTH / size
        world.position[0, bowl, 1] = -0.22  # nothing else stands there
        weight = np.abs(image(world, size) - empty).sum(axis=2)
        centres.append((weight.sum(axis=0) * np.arange(size)).sum() / weight.sum())
    np.testing.assert_allclose(np.diff(centres).sum(), 3.0, atol=0.25)
    assert np.abs(np.array(centres) - centres[0] - shifts).max() < 0.3


def test_rows_look_the_same_alone_and_together_and_after_changes():
    world = TabletopWorld(5)
    renderers = {camera: Renderer(world, camera, 56) for camera in ("agent", "wrist")}
    rng = np.random.default_rng(0)
    for row in range(5):
        world.reset(row, initial_state("tabletop_goal", row, row))
    rows = np.arange(5)
    for _ in range(40):
        world.step(rows, rng.uniform(-1, 1, (5, 7)).astype(np.float32))
        for renderer in renderers.values():
            renderer.render(rows)
    for camera, renderer in renderers.items():
        together = renderer.render(rows)
        alone = np.concatenate([Renderer(world, camera, 56).render(rows[i : i + 1]) for i in range(5)])
        np.testing.assert_array_equal(together, alone)


def test_a_burning_stove_is_red_and_an_open_drawer_shows():
    world = world_with("tabletop_goal", 3)
    cold = image(world)
    world.stove_on[0] = True
    hot = image(world)
    redder = (hot[..., 0] - hot[..., 2]) - (cold[..., 0] - cold[..., 2])
    assert (redder > 60).sum() >= 20
    drawer = int(np.flatnonzero(world.kind[0] == KIND_IDS["drawer"])[0])
    world.position[0, drawer, 1] -= 0.08
    assert (np.abs(image(world) - hot).max(axis=2) > 30).sum() >= 20


def test_open_and_closed_fingers_and_their_height_are_seen():
    world = world_with("tabletop_goal", 0)
    opened = image(world)
    world.opening[0] = 0.0
    assert (np.abs(image(world) - opened).max(axis=2) > 30).sum() >= 10
    world.opening[0] = 1.0
    world.eef[0, 2] -= 0.05
    assert (np.abs(image(world) - opened).max(axis=2) > 30).sum() >= 30


def test_objects_look_different_at_56_pixels():
    """Every grocery can be distinguished from every other by its colours alone."""
    kinds = [task.goals[0].obj for task in SUITES["tabletop_object"].tasks]
    patches = []
    for kind in kinds:
        world = TabletopWorld(1)
        world.kind[0, 0] = KIND_IDS[kind]
        world.eef[0] = (0.3, 0.3, 0.3)
        patches.append(image(world, 56))
    for i, a in enumerate(patches):
        for b in patches[i + 1 :]:
            assert (np.abs(a - b).max(axis=2) > 40).sum() >= 8


def block_means(image: np.ndarray) -> np.ndarray:
    side = len(image) // 8
    return image.reshape(8, side, 8, side, 3).mean(axis=(1, 3))


@pytest.mark.parametrize("size", [56, 64, 128, 224])
def test_any_resolution_shows_the_same_scene(size):
    world = world_with("tabletop_spatial", 2)
    np.testing.assert_allclose(block_means(image(world, size)), block_means(image(world, 256)), atol=6)
