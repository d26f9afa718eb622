"""Recording: what is written is read again, and is what TensorFlow Datasets would write."""

import json
from pathlib import Path

import numpy as np
import pytest

from vlarl.data.conventions import policy_actions, recorded_actions
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.tf_example import Example
from vlarl.data.rlds.writer import RldsWriter
from vlarl.envs.base import Demonstration
from vlarl.errors import UsageError
from vlarl.types import Task

GOLDEN = Path(__file__).parents[2] / "golden" / "rlds"


def episode(seed: int, length: int, *, success: bool = True, views: int = 2) -> Demonstration:
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (length, 7)).astype(np.float32)
    actions[:, 6] = rng.integers(0, 2, length)
    ramp = np.linspace(0, 255, 32).astype(np.uint8)
    smooth = np.broadcast_to(ramp[:, None, None], (length, views, 32, 32, 3)).copy()
    smooth[..., 1] = seed * 20
    rewards = np.zeros(length, np.float32)
    rewards[-1] = success
    return Demonstration(
        Task("libero_spatial", 3, 7, seed),
        f"do task {seed}",
        smooth,
        rng.normal(size=(length, 8)).astype(np.float32),
        actions,
        rewards,
        success,
    )


def record(root: Path, episodes: list[Demonstration], name: str = "libero_spatial", **options: int) -> RldsDataset:
    with RldsWriter(root, name, **options) as writer:
        for one in episodes:
            writer.add(one)
    return RldsDataset(root)


def test_values_are_read_back_exactly_and_images_nearly(tmp_path):
    episodes = [episode(1, 5), episode(2, 3, success=False)]
    dataset = record(tmp_path, episodes)
    assert len(dataset) == 2 and dataset.folder == tmp_path / "libero_spatial" / "1.0.0"
    for ours, given in zip(dataset, episodes, strict=True):
        actions = ours.values("steps/action")
        np.testing.assert_array_equal(actions[:, :6], given.actions[:, :6])
        np.testing.assert_array_equal(actions[:, 6], np.where(given.actions[:, 6] == 1, -1, 1))  # LIBERO's: open is -1
        np.testing.assert_array_equal(policy_actions("libero_spatial", actions), given.actions)
        np.testing.assert_array_equal(ours.values("steps/observation/state"), given.proprio)
        np.testing.assert_array_equal(ours.values("steps/reward"), given.rewards)
        np.testing.assert_array_equal(ours.values("steps/discount"), np.ones(len(ours)))
        last = [False] * (len(ours) - 1)
        np.testing.assert_array_equal(ours.values("steps/is_first"), [True, *last])
        np.testing.assert_array_equal(ours.values("steps/is_last"), [*last, True])
        np.testing.assert_array_equal(ours.values("steps/is_terminal"), [*last, given.success])
        assert ours.texts("steps/language_instruction") == [given.instruction] * len(ours)
        assert ours.texts("episode_metadata/file_path") == [given.task.episode_id]
        for view, camera in enumerate(("image", "wrist_image")):
            frames = ours.images(f"steps/observation/{camera}").astype(int)
            assert np.abs(frames - given.images[:, view]).max() <= 6


def test_records_have_the_features_and_kinds_of_those_that_tensorflow_datasets_wrote(tmp_path):
    theirs, ours = RldsDataset(GOLDEN), record(tmp_path, [episode(1, 4)])
    unknown = {"steps/observation/joint_state"}  # our experts do not record it
    assert set(ours.fields) == set(theirs.fields) - unknown
    for name, field in ours.fields.items():
        expected = theirs.fields[name]
        assert (field.kind, field.dtype) == (expected.kind, expected.dtype), name
        assert field.shape == expected.shape or field.kind == "image", name
    records = [Example(d._shard(0).record(0)) for d in (ours, theirs)]
    assert set(records[0].names) == set(records[1].names) - unknown
    for name in records[0].names:
        assert records[0].kind(name) == records[1].kind(name), name
    infos = [json.loads((d.folder / "dataset_info.json").read_text()) for d in (ours, theirs)]
    assert set(infos[0]) == set(infos[1]) and set(infos[0]["splits"][0]) == set(infos[1]["splits"][0])
    payload = sum(len(theirs._shard(s).record(i)) for s in range(2) for i in range(4))
    assert int(infos[1]["splits"][0]["numBytes"]) == payload  # its meaning there …
    assert int(infos[0]["splits"][0]["numBytes"]) == len(ours._shard(0).record(0))  # … and here


def test_shards_are_filled_and_numbered(tmp_path):
    episodes = [episode(i, 4) for i in range(5)]
    size = len(record(tmp_path / "one", episodes[:1])._shard(0).record(0))
    dataset = record(tmp_path / "many", episodes, shard_bytes=int(2.5 * size))
    assert dataset.shard_lengths == [2, 2, 1]
    assert sorted(path.name for path in dataset.folder.glob("*tfrecord*")) == [
        f"libero_spatial-train.tfrecord-0000{i}-of-00003" for i in range(3)
    ]
    assert [e.texts("steps/language_instruction")[0] for e in dataset] == [f"do task {i}" for i in range(5)]


def test_statistics_are_those_of_the_policy(tmp_path):
    episodes = [episode(1, 40), episode(2, 60)]
    dataset = record(tmp_path, episodes)
    statistics = json.loads((dataset.folder / "dataset_statistics.json").read_text())["libero_spatial"]
    actions = np.concatenate([e.actions for e in episodes])
    assert statistics["num_transitions"] == 100 and statistics["num_trajectories"] == 2
    assert statistics["action"]["mask"] == [True] * 6 + [False]
    np.testing.assert_allclose(statistics["action"]["q99"], np.quantile(actions, 0.99, axis=0), rtol=1e-6)
    np.testing.assert_allclose(statistics["action"]["mean"], actions.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert set(statistics["proprio"]) >= {"mean", "std", "max", "min", "q01", "q99"}


def test_other_suites_keep_their_gripper(tmp_path):
    given = episode(1, 4, views=1)
    dataset = record(tmp_path, [given], name="metaworld_mt10")
    np.testing.assert_array_equal(dataset[0].values("steps/action"), given.actions)
    assert "steps/observation/wrist_image" not in dataset.fields
    assert recorded_actions("metaworld_mt10", given.actions) is given.actions


def test_what_was_recorded_before_an_interruption_is_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt), RldsWriter(tmp_path, "libero_10") as writer:
        writer.add(episode(1, 4))
        raise KeyboardInterrupt
    assert len(RldsDataset(tmp_path)) == 1
    with pytest.raises(UsageError, match="exists already, and recordings are never overwritten"):
        RldsWriter(tmp_path, "libero_10")


def test_nothing_recorded_leaves_nothing(tmp_path):
    with RldsWriter(tmp_path, "libero_10"):
        pass
    assert list((tmp_path / "libero_10").iterdir()) == []


def test_episodes_of_another_shape_are_refused(tmp_path):
    with RldsWriter(tmp_path, "libero_10") as writer:
        writer.add(episode(1, 4))
        with pytest.raises(ValueError, match="the same fields"):
            writer.add(episode(1, 4, views=1))
