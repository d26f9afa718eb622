"""RLDS data that TensorFlow Datasets wrote: every array equal to what it reads."""

import struct

import numpy as np
import pytest
from fakes.golden_arrays import Arrays, load_arrays, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.config.dataset_folder import find_dataset
from vlarl.config.finetune import DemoConfig
from vlarl.data.demo_set import DemoSet
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.tfrecord import masked_crc

FOLDER = golden_folder("rlds")


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_arrays(FOLDER / "expected.npz")


@pytest.fixture(scope="module")
def read() -> dict[str, np.ndarray]:
    """All arrays of the golden file, as our reader returns them."""
    ours = {}
    for number, episode in enumerate(RldsDataset(find_dataset(FOLDER))):
        ours |= {
            f"ep{number}_action": episode.values("steps/action"),
            f"ep{number}_state": episode.values("steps/observation/state"),
            f"ep{number}_image0": episode.images("steps/observation/image", [0])[0],
            f"ep{number}_wrist_last": episode.steps[-1].image("wrist_image"),
            f"ep{number}_instruction": np.array(episode.steps[0].text()),
            f"ep{number}_file_path": np.array(episode.texts("episode_metadata/file_path")[0]),
            f"ep{number}_is_last": episode.values("steps/is_last"),
        }
    return ours


def test_every_array_is_what_tensorflow_datasets_reads(read, expected):
    """Fails for a golden array that no comparison here covers."""

    def check(arrays: Arrays) -> None:
        assert set(read) == set(arrays)
        for name in arrays:
            assert read[name].dtype == arrays[name].dtype, name
            np.testing.assert_array_equal(read[name], arrays[name], err_msg=name)

    check(expected)
    assert unnoticed(expected, [check]) == []


def test_the_mask_of_checksums_is_tensorflows():
    """Each shard starts with the length of a record and the checksum that TensorFlow wrote beside it."""
    shards = list(FOLDER.glob("*/*/*.tfrecord-*"))
    assert shards
    for shard in shards:
        with shard.open("rb") as file:
            head = file.read(12)
        assert masked_crc(head[:8]) == struct.unpack("<I", head[8:])[0]


def test_episodes_become_one_flat_set_of_demonstrations(expected):
    dataset = RldsDataset(find_dataset(FOLDER))
    demos: DemoSet = RldsSource(DemoConfig(), str(FOLDER), num_images=2).collect(lambda *_: None)
    episodes = [f"ep{number}" for number in range(len(dataset))]
    actions = np.concatenate([expected[f"{episode}_action"] for episode in episodes])
    np.testing.assert_array_equal(demos.proprio, np.concatenate([expected[f"{e}_state"] for e in episodes]))
    np.testing.assert_array_equal(demos.actions[:, :-1], actions[:, :-1])
    np.testing.assert_array_equal(demos.actions[:, -1], 1 - np.clip(actions[:, -1], 0, 1))  # open is 1 to a policy
    ends = np.append(demos.episode_starts[1:], len(demos))
    for episode, start, end in zip(episodes, demos.episode_starts, ends, strict=True):
        np.testing.assert_array_equal(demos.images[int(start)][0], expected[f"{episode}_image0"])
        np.testing.assert_array_equal(demos.images[int(end) - 1][1], expected[f"{episode}_wrist_last"])
        assert demos.instructions[demos.instruction_ids[start]] == str(expected[f"{episode}_instruction"])
    assert demos.success.tolist() == [bool(episode.values("steps/reward")[-1] > 0) for episode in dataset]
    assert demos.name == dataset.name.removesuffix("_no_noops")
    assert demos.images.shape == (len(actions), 2, *expected["ep0_image0"].shape)
