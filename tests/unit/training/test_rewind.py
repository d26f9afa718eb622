"""Resuming from an earlier checkpoint: later ones are moved to `set_aside`, and nothing is deleted."""

import json

import pytest

from vlarl.training.rewind import set_later_aside
from vlarl.training.state import TrainerState


def checkpoint(folder, name, iteration):
    (folder / name).mkdir(parents=True)
    (folder / name / "trainer.json").write_text(json.dumps({"iteration": iteration}))
    return folder / name


def policy(folder, name, **metadata):
    (folder / name).mkdir(parents=True)
    (folder / name / "metadata.json").write_text(json.dumps(metadata))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_later_is_set_aside_and_what_was_saved_before_stays(tmp_path):
    chosen = checkpoint(tmp_path, "step_000002", 2)
    for name, iteration in (("step_000001", 1), ("step_000003", 3), ("final", 4)):
        checkpoint(tmp_path, name, iteration)
    policy(tmp_path, "ema", training_step=4, checkpoint="final")
    policy(tmp_path, "best_return", training_step=1, global_step=90)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "trainer.json").write_text("{")
    (tmp_path / "note.txt").write_text("mine")
    state = TrainerState(iteration=2, env_steps=100)
    assert set_later_aside(tmp_path, chosen, state) == ["damaged", "ema", "final", "step_000003"]
    assert names(tmp_path) == ["best_return", "note.txt", "set_aside", "step_000001", "step_000002"]
    assert names(tmp_path / "set_aside") == ["damaged", "ema", "final", "step_000003"]
    assert json.loads((tmp_path / "set_aside" / "final" / "trainer.json").read_text()) == {"iteration": 4}
    assert set_later_aside(tmp_path, chosen, state) == []


@pytest.mark.parametrize("content", ['{"iteration": "x"}', '{"iteration": null}', '{"iteration": NaN}', "[1]"])
def test_a_checkpoint_without_a_readable_count_is_later(tmp_path, content):
    chosen = checkpoint(tmp_path, "step_000002", 2)
    (checkpoint(tmp_path, "step_000001", 1) / "trainer.json").write_text(content)
    assert set_later_aside(tmp_path, chosen, TrainerState(2, env_steps=100)) == ["step_000001"]


@pytest.mark.parametrize("content", ["{", "", "[1]", '{"training_step": "x"}', '{"global_step": Infinity}'])
def test_a_policy_whose_note_can_not_be_read_is_later(tmp_path, content):
    chosen = checkpoint(tmp_path, "step_000002", 2)
    policy(tmp_path, "ema")
    (tmp_path / "ema" / "metadata.json").write_text(content)
    (tmp_path / "mine").mkdir()  # has no note: it is not the run's
    assert set_later_aside(tmp_path, chosen, TrainerState(2, env_steps=100)) == ["ema"]


def test_setting_aside_twice_keeps_both(tmp_path):
    chosen = checkpoint(tmp_path, "step_000002", 2)
    for _ in range(3):
        checkpoint(tmp_path, "step_000003", 3)
        policy(tmp_path, "best_return", training_step=9, global_step=101)
        assert set_later_aside(tmp_path, chosen, TrainerState(2, env_steps=100)) == ["best_return", "step_000003"]
    assert names(tmp_path / "set_aside") == [
        *("best_return", "best_return-2", "best_return-3", "step_000003", "step_000003-2", "step_000003-3"),
    ]
