"""A power cut at every step of a save, and of the recovery after it: a restart finds a whole checkpoint, old or new."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from fakes.disk import Disk, PowerCutError

from vlarl.errors import VlarlError
from vlarl.policies.tiny import init_tiny
from vlarl.training.checkpoint import COUNTERS, CheckpointStore
from vlarl.training.state import TrainerState


class NotePolicy(torch.nn.Module):
    """Stands in for a policy: two files, one of them in a folder. Each is a change that the power cut may come before."""

    def __init__(self, text: str, disk: Disk | None = None) -> None:
        super().__init__()
        self.text = text
        self.disk = disk

    def save(self, folder: Path, dtype=None) -> None:
        (folder / "critic").mkdir()
        for path in (folder / "weights", folder / "critic" / "weights"):
            if self.disk is not None:
                self.disk.change("write", str(path))
            path.write_text(self.text)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def whole(text: str) -> dict[str, str]:
    return {"critic/weights": text, "metadata.json": "{}", "weights": text}


def with_old_one(folder: Path) -> Path:
    CheckpointStore(folder, 2).save_policy("final", NotePolicy("old"), {})
    return folder


def changes_of_a_save(folder: Path) -> Disk:
    with pytest.MonkeyPatch.context() as patch:
        store = CheckpointStore(with_old_one(folder), 2)
        disk = Disk(patch)
        store.save_policy("final", NotePolicy("new", disk), {})
    return disk


def save_with_power_cut(folder: Path, cut_at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        store = CheckpointStore(with_old_one(folder), 2)
        disk = Disk(patch, cut_at)
        with pytest.raises(PowerCutError):
            store.save_policy("final", NotePolicy("new", disk), {})


def test_a_power_cut_at_any_step_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """Until the new one has its name, a restart finds the old one; from then on the new one."""
    disk = changes_of_a_save(tmp_path / "undisturbed")
    assert contents(tmp_path / "undisturbed" / "final") == whole("new")
    (named,) = disk.places("rename", tmp_path / "undisturbed" / ".new-final")
    steps = [what for what, _ in disk.log]
    assert steps[:3] == ["mkdir", "mkdir", "write"] and steps.count("rename") == 2 and "rmdir" in steps[named:]
    for cut_at in range(len(disk.log)):
        folder = tmp_path / str(cut_at)
        save_with_power_cut(folder, cut_at)
        CheckpointStore(folder, 2)  # the restart
        assert contents(folder / "final") == whole("new" if cut_at > named else "old"), disk.log[cut_at]
        assert [path.name for path in folder.iterdir()] == ["final"]


def test_a_power_cut_in_the_recovery_loses_nothing_either(tmp_path):
    disk = changes_of_a_save(tmp_path / "undisturbed")
    (named,) = disk.places("rename", tmp_path / "undisturbed" / ".new-final")
    for cut_at in (named - 1, named, named + 1, len(disk.log) - 1):
        recovering = True
        for again_at in range(1, 20):  # the first change is mkdir of the folder itself, which is there
            folder = tmp_path / f"{cut_at}-{again_at}"
            save_with_power_cut(folder, cut_at)
            with pytest.MonkeyPatch.context() as patch:
                Disk(patch, again_at)
                try:
                    CheckpointStore(folder, 2)
                    recovering = False
                except PowerCutError:
                    pass
            CheckpointStore(folder, 2)
            assert contents(folder / "final") == whole("new" if cut_at > named else "old")
            if not recovering:
                break
        assert not recovering, "the recovery takes fewer steps"


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path):
    """Files and folders are synced before the rename, the renames before the old one is removed."""
    disk = changes_of_a_save(tmp_path)
    fresh, old = tmp_path / ".new-final", tmp_path / ".old-final"
    (set_aside,), (named,) = disk.places("rename", tmp_path / "final"), disk.places("rename", fresh)
    assert set_aside < named
    written = [place for place, (what, _) in enumerate(disk.log) if what == "write"]
    for path in (".", "weights", "critic", "critic/weights", "metadata.json"):
        (synced,) = disk.places("fsync", fresh / path)
        assert max(written) < synced < set_aside, path
    (folder_synced,) = disk.places("fsync", tmp_path)
    # rmtree removes a folder's files by their names alone.
    removed = [place for place, (what, _) in enumerate(disk.log) if what in ("unlink", "rmdir") and place > named]
    assert disk.places("rmdir", old) and named < folder_synced < min(removed)


def test_a_power_cut_never_leaves_a_checkpoint_that_is_newer_than_its_average(tmp_path, configure, build):
    """A run whose final checkpoint exists is finished: `--resume` would not write an average that it lacks."""
    learner = build(init_tiny("parallel", seed=3), configure(ema={"beta": 0.9}))

    def save(folder: Path, cut_at: int | None = None) -> Disk:
        store = CheckpointStore(folder, 2)
        store.save("final", learner, TrainerState(iteration=1))
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, cut_at)
            store.save("final", learner, TrainerState(iteration=2))
        return disk

    def iterations(folder: Path) -> tuple[int, int]:
        checkpoint, average = folder / "final" / COUNTERS, folder / "ema" / "metadata.json"
        return json.loads(checkpoint.read_text())["iteration"], json.loads(average.read_text())["training_step"]

    renames = [step for step, (what, _) in enumerate(save(tmp_path / "undisturbed").log) if what == "rename"]
    assert iterations(tmp_path / "undisturbed") == (2, 2)
    for step in renames:  # just before each rename, and just after it
        for cut_at in (step, step + 1):
            folder = tmp_path / str(cut_at)
            with pytest.raises(PowerCutError):
                save(folder, cut_at)
            CheckpointStore(folder, 2)  # the restart
            checkpoint, average = iterations(folder)
            assert checkpoint <= average, cut_at


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_does_not_cost_the_old_one_when_the_next_save_begins(tmp_path, monkeypatch, failing):
    """The process continues after the error: a run that fails saves once more."""
    store, rename, calls = CheckpointStore(with_old_one(tmp_path), 2), os.rename, []

    def refused(*arguments, **named):
        calls.append(arguments)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        return rename(*arguments, **named)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(VlarlError, match="Input/output error"):
        store.save_policy("final", NotePolicy("new"), {})

    class Failing(NotePolicy):
        def save(self, folder: Path, dtype=None) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(VlarlError, match="the disk is full"):
        store.save_policy("final", Failing("newer"), {})
    CheckpointStore(tmp_path, 2)
    assert contents(tmp_path / "final") == whole("old")
