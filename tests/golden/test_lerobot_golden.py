"""LeRobot datasets that lerobot wrote: every array equal to what it reads, frames of videos close to them."""

import numpy as np
import pytest
from fakes.golden_arrays import Arrays, load_arrays, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.config.finetune import DemoConfig
from vlarl.data.lerobot.demos import LeRobotSource
from vlarl.data.lerobot.reader import LeRobotDataset

FOLDER = golden_folder("lerobot")
GREY_LEVELS = 3.0  # mean absolute difference of frames that went through a video
IMAGE, STATE, ACTION = "observation.images.image", "observation.state", "action"


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_arrays(FOLDER / "expected_lerobot.npz")


def read(kind: str) -> dict[str, np.ndarray]:
    """All that the golden file may have of a dataset, as our reader returns it."""
    ours: dict[str, np.ndarray] = {}
    for number, episode in enumerate(LeRobotDataset(FOLDER / f"lerobot_{kind}")):
        start = f"{kind}/ep{number}"
        ours |= {f"{start}/length": np.array(len(episode)), f"{start}/task": np.array(episode.texts()[0])}
        for part, rows in (
            ("state", episode.values(STATE)),
            ("action", episode.values(ACTION)),
            ("image", episode.images(IMAGE)),
        ):
            ours |= {f"{start}/{part}_{step}": row for step, row in enumerate(rows)}
    return ours


@pytest.fixture(scope="module")
def ours() -> dict[str, np.ndarray]:
    return read("image") | read("video")


def is_frame_of_video(name: str) -> bool:
    return name.startswith("video/") and "/image_" in name


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours.astype(np.float64) - theirs).mean())


def test_every_array_is_what_lerobot_reads(ours, expected):
    """Fails for a golden array that no comparison here covers."""

    def check(arrays: Arrays) -> None:
        assert set(arrays) <= set(ours)
        differences = []
        for name, theirs in arrays.items():
            assert ours[name].shape == theirs.shape, name
            if is_frame_of_video(name):
                differences.append(difference(ours[name], theirs))
            else:
                assert ours[name].dtype == theirs.dtype, name
                np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        assert np.mean(differences) <= GREY_LEVELS
        assert max(differences) <= 3 * GREY_LEVELS

    check(expected)
    assert unnoticed(expected, [check]) == []


def test_a_frame_of_a_video_is_that_of_its_own_step(ours, expected):
    """The frames before encoding are those of the image dataset: nearest to each decoded frame is the one of its step.

    What the encoder lost is more than a grey level or two in every second frame, which is not a key frame, with any
    decoder. So the bound is for key frames, and the step is checked for all.
    """
    for start in {name.rpartition("/")[0] for name in ours if name.startswith("video/")}:
        length = int(ours[f"{start}/length"])
        before = np.stack([ours[f"image/{start.partition('/')[2]}/image_{step}"] for step in range(length)])
        for step in range(length):
            frame = ours[f"{start}/image_{step}"].astype(np.float64)
            away = np.abs(before - frame).mean(axis=(1, 2, 3))
            assert away.argmin() == step, (start, step)
        assert difference(ours[f"{start}/image_0"], before[0]) <= GREY_LEVELS


def test_the_lengths_of_all_episodes_are_expected(ours, expected):
    lengths = {name for name in ours if name.endswith("/length")}
    assert lengths == {name for name in expected if name.endswith("/length")}


@pytest.mark.parametrize("kind", ["image", "video"])
def test_episodes_become_one_flat_set_of_demonstrations(kind, ours, expected):
    """With the declared gripper, and frames read from the disk one at a time."""
    config = DemoConfig(gripper="closed_is_1", dataset_name="libero_spatial_no_noops")
    demos = LeRobotSource(config, str(FOLDER / f"lerobot_{kind}"), num_images=2).collect(lambda *_: None)
    steps = [
        f"{kind}/ep{episode}/{{}}_{step}"
        for episode, length in enumerate(demos.episode_lengths)
        for step in range(int(expected[f"{kind}/ep{episode}/length"]))
        if length == expected[f"{kind}/ep{episode}/length"]
    ]
    actions = np.stack([expected[step.format("action")] for step in steps])
    np.testing.assert_array_equal(demos.proprio, np.stack([expected[step.format("state")] for step in steps]))
    np.testing.assert_array_equal(demos.actions[:, :-1], actions[:, :-1])
    np.testing.assert_array_equal(demos.actions[:, -1], 1 - np.clip(actions[:, -1], 0, 1))  # open is 1 to a policy
    assert demos.name == "libero_spatial" and demos.images.shape[:2] == (len(steps), 2)
    for row in (0, len(steps) // 2, len(steps) - 1):
        np.testing.assert_array_equal(demos.images[row][0], ours[steps[row].format("image")])
    tasks = [str(expected[f"{kind}/ep{episode}/task"]) for episode in range(len(demos.episode_lengths))]
    assert [demos.instructions[demos.instruction_ids[start]] for start in demos.episode_starts] == tasks
