"""Saved episodes: what is in the datasets after a commit, a kill, a resume; and grown datasets are those written at
once."""

import json
from pathlib import Path

import numpy as np
import pytest

from vlarl.config.finetune import DemoConfig
from vlarl.data.demos import collect_demos, open_sources
from vlarl.data.lerobot.demonstrations import DemonstrationWriter
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.parts import aside, read_parts
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.writer import RldsWriter
from vlarl.data.rollouts import (
    EvaluatedEpisodes,
    TrainingEpisodes,
    dataset_folder,
    drop_after,
    refuse_other_format,
)
from vlarl.errors import RowsLostError, UsageError, VlarlError
from vlarl.images.jpeg import decode_image, encode_jpeg
from vlarl.rollout.collector import Episode
from vlarl.rollout.steps import EpisodeSteps
from vlarl.types import Observation, Task, Trajectory

SUITE = "tabletop_goal"
FORMATS = ("rlds", "lerobot")


def episode(index: int, suite: str = SUITE, success: bool | None = None, status: str = "ok") -> Episode:
    """Episode `index`, whose every value says which it is; every second one succeeds."""
    rng = np.random.default_rng(index)
    success = index % 2 == 0 if success is None else success
    length = 3 + index % 4
    ramp = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)
    seen = [
        Observation(
            np.stack([np.stack([ramp * 3, ramp + 9 * (index % 20), ramp + 5 * step], -1)] * 2),
            rng.normal(size=8).astype(np.float32),
            f"do {index % 3}",
        )
        for step in range(length)
    ]
    actions = [rng.uniform(-1, 1, 7).astype(np.float32) for _ in range(length)]
    rewards = rng.normal(size=length).astype(np.float32).tolist()
    task = Task(suite, index % 3, 5, seed=index)
    trajectory = Trajectory(task, (), seen[-1], success, not success, success, 0, status)  # type: ignore[arg-type]
    return Episode(trajectory, steps=EpisodeSteps(seen, actions, rewards))


def opened(root: Path, kind: str, suite: str = SUITE) -> RldsDataset | LeRobotDataset:
    return RldsDataset(root / suite) if kind == "rlds" else LeRobotDataset(root / suite)


def saved(root: Path, kind: str, suite: str = SUITE) -> list[str]:
    """The ids of the episodes of a dataset."""
    found = opened(root, kind, suite)
    if isinstance(found, LeRobotDataset):
        return [each.metadata["file_path"] for each in found]
    return [each.texts("episode_metadata/file_path")[0] for each in found]


def ids(*indices: int, suite: str = SUITE) -> list[str]:
    return [episode(index, suite).trajectory.task.episode_id for index in indices]


def saver(root: Path, kind: str, which: str = "all") -> TrainingEpisodes:
    return TrainingEpisodes(root, kind, 10 if kind == "lerobot" else None, which)


def trained(saver: TrainingEpisodes, iteration: int, *indices: int, suite: str = SUITE) -> None:
    """An iteration with these episodes, and its update."""
    episodes = [episode(index, suite) for index in indices]
    for each in reversed(episodes):  # they end in another order
        saver.take(each)
    saver.record(iteration, [each.trajectory for each in episodes])
    saver.settle()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_saved_steps_are_those_that_were_executed(tmp_path, kind):
    """To the bit; JPEG as the writer encodes it."""
    with saver(tmp_path, kind) as ours:
        trained(ours, 1, 0, 1)
        ours.commit()
    for index, found in enumerate(opened(tmp_path, kind)):
        given = episode(index).steps
        assert given is not None
        images = np.stack([each.images for each in given.seen])
        rlds = kind == "rlds"
        names = ("steps/observation/", "steps/") if rlds else ("observation.images.", "")
        for view, name in enumerate(("image", "wrist_image")):
            expected = [decode_image(encode_jpeg(frame)) for frame in images[:, view]] if rlds else images[:, view]
            np.testing.assert_array_equal(found.images(f"{names[0]}{name}"), expected)
        state = "steps/observation/state" if rlds else "observation.state"
        np.testing.assert_array_equal(found.values(state), [each.proprio for each in given.seen])
        np.testing.assert_array_equal(found.values(f"{names[1]}action"), given.actions)
        reward, success = ("steps/reward", "steps/is_terminal") if rlds else ("next.reward", "next.success")
        np.testing.assert_array_equal(found.values(reward).reshape(-1), np.float32(given.rewards))
        last = [False] * (len(given) - 1) + [index % 2 == 0]
        np.testing.assert_array_equal(found.values(success).reshape(-1), last)
        assert found.texts(*(["steps/language_instruction"] if rlds else [])) == [f"do {index}"] * len(given)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_grown_dataset_is_one_that_was_written_at_once(tmp_path, kind):
    """In three commits, one of them in a later session: the same statistics, counters, and steps."""
    with saver(tmp_path / "grown", kind) as first:
        trained(first, 1, 0, 1, 2)
        first.commit()
        trained(first, 2, 3)
        first.commit()
    with saver(tmp_path / "grown", kind) as second:
        trained(second, 4, 4, 5)
        second.commit()
    writer = (
        RldsWriter(tmp_path / "whole", SUITE)
        if kind == "rlds"
        else DemonstrationWriter(tmp_path / "whole", SUITE, 10, video=False)
    )
    with writer:
        for index in range(6):
            whole = episode(index)
            assert whole.steps is not None
            writer.add(whole.steps.demonstration(whole.trajectory.task, whole.trajectory.success))
    ours, theirs = opened(tmp_path / "grown", kind), opened(tmp_path / "whole", kind)
    assert saved(tmp_path / "grown", kind) == ids(0, 1, 2, 3, 4, 5) and dict(ours.fields) == dict(theirs.fields)
    for one, other in zip(ours, theirs, strict=True):
        for name, field in ours.fields.items():
            if field.kind == "tensor":
                np.testing.assert_array_equal(one.values(name), other.values(name))
            elif field.kind == "image":
                np.testing.assert_array_equal(one.images(name), other.images(name))
            elif name.startswith("steps/") or name == "task":
                assert one.texts(name) == other.texts(name)
    folders = [dataset_folder(tmp_path / name, SUITE, kind) for name in ("grown", "whole")]
    statistics = "dataset_statistics.json" if kind == "rlds" else "meta/stats.json"
    grown, whole = (json.loads((folder / statistics).read_text()) for folder in folders)
    assert grown == whole
    if kind == "lerobot":
        grown, whole = (json.loads((folder / "meta/info.json").read_text()) for folder in folders)
        assert grown == whole
    else:
        info = json.loads((folders[0] / "dataset_info.json").read_text())["splits"][0]
        assert info["shardLengths"] == ["3", "1", "2"]
        assert info["numBytes"] == json.loads((folders[1] / "dataset_info.json").read_text())["splits"][0]["numBytes"]


@pytest.mark.parametrize("kind", FORMATS)
def test_filters_and_crashes(tmp_path, kind):
    with saver(tmp_path, kind, "successes") as ours:
        trained(ours, 1, 0, 1, 2)
        crashed = episode(4, status="crashed")
        ours.take(crashed)
        ours.take(Episode(episode(6).trajectory))  # its steps were not recorded
        ours.record(2, [crashed.trajectory, episode(6).trajectory])
        ours.settle()
        ours.commit()
    assert saved(tmp_path, kind) == ids(0, 2)


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_was_committed_is_there_and_a_resumed_run_drops_what_is_later(tmp_path, kind):
    with saver(tmp_path / "whole", kind) as undisturbed:
        for iteration in (1, 2, 3, 4):
            trained(undisturbed, iteration, 2 * iteration, 2 * iteration + 1)
            undisturbed.commit()
    with saver(tmp_path / "run", kind) as first:
        trained(first, 1, 2, 3)
        trained(first, 2, 4, 5)
        first.commit()
        trained(first, 3, 90, 91)  # collected after the last checkpoint
    assert saved(tmp_path / "run", kind) == ids(2, 3, 4, 5), "the third iteration was never completed"
    before = files(tmp_path / "run")
    drop_after(tmp_path / "run", 2)
    assert files(tmp_path / "run") == before, "nothing to drop"
    drop_after(tmp_path / "run", 1)
    assert saved(tmp_path / "run", kind) == ids(2, 3)
    for iteration in (2, 3, 4):
        with saver(tmp_path / "run", kind) as again:
            trained(again, iteration, 2 * iteration, 2 * iteration + 1)
            again.commit()
    assert files(tmp_path / "run") == files(tmp_path / "whole"), "to the byte"
    drop_after(tmp_path / "run", 0)
    assert not (tmp_path / "run" / SUITE).exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_kill_while_the_new_dataset_takes_the_place_of_the_old(tmp_path, kind):
    with saver(tmp_path, kind) as ours:
        trained(ours, 1, 0)
        ours.commit()
    folder = dataset_folder(tmp_path, SUITE, kind)
    before = files(folder)
    folder.rename(aside(folder))
    half = folder.with_name(f".{folder.name}.partial")
    half.mkdir()
    drop_after(tmp_path, 1)
    assert files(folder) == before and not half.exists() and not aside(folder).exists()
    shutil_free = [path.name for path in folder.parent.iterdir()]
    assert shutil_free == [folder.name]


def test_episodes_wait_for_the_update_on_them(tmp_path):
    """Of several rollouts for one update, the later ones are not saved with a checkpoint of before it."""
    with saver(tmp_path, "rlds") as ours:
        trained(ours, 2, 0)
        late = episode(1)
        ours.take(late)
        ours.record(3, [late.trajectory])
        ours.commit()
    assert saved(tmp_path, "rlds") == ids(0)
    assert [part.iteration for part in read_parts(dataset_folder(tmp_path, SUITE, "rlds"))] == [2]


def test_an_episode_that_ended_early_counts_in_the_iteration_that_has_it(tmp_path):
    """With rollouts ahead of the update."""
    with saver(tmp_path, "rlds") as ours:
        for index in (0, 1, 2):
            ours.take(episode(index))
        for iteration, index in ((1, 1), (2, 0)):
            ours.record(iteration, [episode(index).trajectory])
            ours.settle()
        ours.commit()
    assert saved(tmp_path, "rlds") == ids(1, 0)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_suite_has_a_dataset(tmp_path, kind):
    with saver(tmp_path, kind) as ours:
        trained(ours, 1, 0, 1)
        trained(ours, 1, 2, suite="tabletop_object")
        ours.commit()
        trained(ours, 2, 3, suite="tabletop_object")
        ours.commit()
    assert saved(tmp_path, kind) == ids(0, 1)
    assert saved(tmp_path, kind, "tabletop_object") == ids(2, 3, suite="tabletop_object")
    drop_after(tmp_path, 1)
    assert saved(tmp_path, kind, "tabletop_object") == ids(2, suite="tabletop_object")


def test_libero_s_actions_are_written_in_the_suite_s_convention(tmp_path):
    """-1 open and 1 closed, as in `vlarl data record`; finetune reads them as the policy gave them."""
    given = episode(0, "libero_spatial")
    assert given.steps is not None
    for action in given.steps.actions:
        action[-1] = float(action[-1] > 0)
    for kind in FORMATS:
        with saver(tmp_path / kind, kind) as ours:
            ours.take(given)
            ours.record(1, [given.trajectory])
            ours.settle()
            ours.commit()
            path = tmp_path / kind / "libero_spatial"
        (stored,) = opened(tmp_path / kind, kind, "libero_spatial")
        actions = stored.values("steps/action" if kind == "rlds" else "action")
        np.testing.assert_array_equal(actions[:, -1], [1 - 2 * each[-1] for each in given.steps.actions])
        demos = collect_demos(open_sources(DemoConfig(path=str(path)), 0, 16, 2), lambda text: None)[0][0]
        np.testing.assert_array_equal(demos.actions, given.steps.actions)


def test_other_suites_grippers_are_declared_as_recorded(tmp_path):
    with saver(tmp_path, "lerobot") as ours:
        trained(ours, 1, 0, suite="gym")
        ours.commit()
    assert LeRobotDataset(tmp_path / "gym").declared.gripper == "as_recorded"


def test_an_episode_whose_frames_are_lost_with_a_machine_is_not_saved(tmp_path, caplog):
    def gone() -> Observation:
        raise RowsLostError("the machine is gone", "name")

    lost = episode(0)
    assert lost.steps is not None
    lost.steps.seen[1] = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), "", fetch=gone)
    with saver(tmp_path, "rlds") as ours:
        ours.take(lost)
        trained(ours, 1, 2)
        ours.record(1, [lost.trajectory])
        ours.settle()
        ours.commit()
    assert saved(tmp_path, "rlds") == ids(2) and "is not saved: the machine is gone" in caplog.text


def test_a_failure_to_write_is_not_followed_by_a_checkpoint(tmp_path, monkeypatch):
    def full(self, episode):
        raise OSError(28, "No space left on device")

    with saver(tmp_path, "rlds") as ours:
        trained(ours, 1, 0)
        ours.commit()
        with monkeypatch.context() as patch:
            patch.setattr(RldsWriter, "add_encoded", full)
            with pytest.raises(VlarlError, match="the disk is full"):
                trained(ours, 2, 1)
        with pytest.raises(VlarlError, match="could not be saved"):
            ours.commit()
    assert saved(tmp_path, "rlds") == ids(0)


def test_a_resumed_run_keeps_its_format(tmp_path):
    with saver(tmp_path, "lerobot") as ours:
        trained(ours, 1, 0)
        ours.commit()
    refuse_other_format(tmp_path, "lerobot", 10)
    refuse_other_format(tmp_path, "none", None)
    with pytest.raises(UsageError, match="has saved its episodes as lerobot: resume it with --rollout.save lerobot"):
        refuse_other_format(tmp_path, "rlds", None)
    with pytest.raises(UsageError, match="with 10 steps a second: resume it with --rollout.save_fps 10"):
        refuse_other_format(tmp_path, "lerobot", 20)


def test_a_dataset_of_another_origin_is_not_extended(tmp_path):
    with RldsWriter(tmp_path, SUITE) as writer:
        whole = episode(0)
        assert whole.steps is not None
        writer.add(whole.steps.demonstration(whole.trajectory.task, True))
    with saver(tmp_path, "rlds") as ours, pytest.raises(UsageError, match="was not saved by this run: move it away"):
        trained(ours, 1, 1)


def test_damaged_parts_are_refused_with_the_remedy(tmp_path):
    with saver(tmp_path, "rlds") as ours:
        trained(ours, 1, 0)
        ours.commit()
    (dataset_folder(tmp_path, SUITE, "rlds") / "vlarl_parts.json").write_text('[{"iteration": 2}]')
    with pytest.raises(UsageError, match=r"vlarl_parts.json is malformed .*: move the dataset .* away"):
        drop_after(tmp_path, 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_evaluated_episodes_are_kept_however_the_evaluation_ends(tmp_path, kind):
    ours = EvaluatedEpisodes(tmp_path, kind, 10, "successes")
    with pytest.raises(KeyboardInterrupt), ours:
        for index in (0, 1, 2):
            ours.add(episode(index))
        raise KeyboardInterrupt
    assert saved(tmp_path, kind) == ids(0, 2) and ours.num_saved == 2
