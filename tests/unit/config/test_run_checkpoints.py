"""Which checkpoint a name means, and how far a run has come."""

import json
from pathlib import Path

import pytest

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.run_checkpoints import (
    RunProgress,
    find_run_folder,
    list_runs,
    locate_checkpoint,
    refuse_unknown,
    resumed_checkpoint,
    run_progress,
)
from vlarl.config.schema import Config
from vlarl.config.source.load import load_config, to_yaml
from vlarl.errors import UsageError
from vlarl.evaluation.request import eval_request
from vlarl.run.preflight import refuse_early


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load_config(overrides={"env.suite": "tabletop_goal"})))
    return folder


def save(run: Path, name: str, iteration: int | None = None, file: str | None = "config.json") -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir()
    if file is not None:
        (folder / file).write_text("{}")
    if iteration is not None:
        (folder / "trainer.json").write_text(json.dumps({"iteration": iteration, "env_steps": 7 * iteration}))
    return folder


NAMES = ["mine", "runs/mine", "runs/mine/", "{folder}/runs/mine"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_run_means_its_final_checkpoint(run, tmp_path, name, file):
    save(run, "step_000004", 4)
    final = save(run, "final", 5, file)
    located = locate_checkpoint(name.replace("{folder}", str(tmp_path)))
    assert Path(located.path).resolve() == final
    assert located.note == "runs/mine: its checkpoints/final is taken"


def test_without_a_final_one_the_newest_is_meant(run):
    for iteration in (8, 16, 4):
        save(run, f"step_{iteration:06d}", iteration)
    save(run, "best_return")
    save(run, "step_000020", 20, file=None)  # in parts, by rank
    located = locate_checkpoint("mine")
    assert located.path == "runs/mine/checkpoints/step_000016"
    assert located.note == "runs/mine: it has no checkpoints/final, so its newest, step_000016, is taken"


def test_a_newer_one_than_the_final_is_named(run):
    save(run, "final", 5)
    save(run, "step_000004", 4)
    assert "is newer" not in locate_checkpoint("mine").note
    save(run, "step_000009", 9)
    located = locate_checkpoint("mine")
    assert located.path == "runs/mine/checkpoints/final"
    assert "(step_000009 is newer: name runs/mine/checkpoints/step_000009 to take it)" in located.note


def test_a_run_without_a_policy_says_what_to_do(run):
    with pytest.raises(
        UsageError, match="runs/mine has no checkpoint yet: .*If it has stopped, `vlarl train --resume runs/mine`"
    ):
        locate_checkpoint("mine")
    save(run, "step_000002", 2, file=None)
    with pytest.raises(UsageError, match="runs/mine holds no whole policy yet: .*when the run finishes"):
        locate_checkpoint("mine")


@pytest.mark.parametrize("name", ["mine/checkpoints/step_000004", "runs/mine/checkpoints/step_000004"])
def test_a_checkpoint_in_a_run_is_meant_itself(run, name):
    save(run, "final", 5)
    folder = save(run, "step_000004", 4)
    located = locate_checkpoint(name)
    assert Path(located.path).resolve() == folder and located.note == ""


@pytest.mark.parametrize("name", ["mine/best_return", "runs/mine/best_return", "{folder}/runs/mine/best_return"])
def test_a_checkpoint_is_named_by_its_run_and_its_own_name(run, tmp_path, name):
    save(run, "final", 5)
    folder = save(run, "best_return")
    located = locate_checkpoint(name.replace("{folder}", str(tmp_path)))
    assert Path(located.path).resolve() == folder and located.note == ""


def test_a_misspelt_one_is_refused_and_any_other_name_is_the_hubs(run):
    save(run, "final", 5)
    save(run, "best_return")
    with pytest.raises(UsageError, match="has no checkpoint finall: did you mean final. It has best_return, final"):
        locate_checkpoint("mine/finall")
    assert locate_checkpoint("mine/openvla-7b").path == "mine/openvla-7b", "an organisation and a run of one name"


@pytest.mark.parametrize("name", ["mine/checkpoints", "runs/mine/checkpoints", "runs/mine/checkpoints/"])
def test_the_folder_of_all_checkpoints_means_the_run(run, name):
    save(run, "final", 5)
    assert locate_checkpoint(name).note == "runs/mine: its checkpoints/final is taken"


@pytest.mark.parametrize("name", ["builtin:tiny-oft", "init:tiny-oft", "openvla/openvla-7b", "nowhere/at/all", "x"])
def test_any_other_name_is_left_as_it_is(run, name):
    assert locate_checkpoint(name).path == name


def test_runs_are_looked_for_below_the_root(run):
    save(run, "final", 5)
    run.parent.rename(run.parent.with_name("elsewhere"))
    assert find_run_folder("mine") is None
    assert locate_checkpoint("mine", "elsewhere").path == "elsewhere/mine/checkpoints/final"


def test_a_name_that_can_be_nothing_is_refused_with_the_runs_there_are(run):
    save(run, "final", 5)
    for name in ("mien", "runs/mien", "runs/mien/checkpoints/final", f"{run.parent}/mien/checkpoints/final"):
        with pytest.raises(UsageError) as caught:
            refuse_unknown(name)
        assert str(caught.value) == (
            f"{name} is not a checkpoint: there is no folder or run of that name. Did you mean the run 'mine'? Runs "
            "with a checkpoint in runs/, newest first: mine."
        )
    for name in ("openvla/openvla-7b", "runs/mien@main", "builtin:tiny-oft", "runs", "runs/mine/checkpoints/final"):
        refuse_unknown(name)


def test_a_run_without_a_checkpoint_is_not_suggested(run):
    """As the one is that was just made for a configuration with the misspelt name."""
    with pytest.raises(UsageError, match=r"of that name\. runs/ holds no runs with a checkpoint\. Give a run's name"):
        refuse_unknown("mien")


@pytest.mark.parametrize("name", ["mine/checkpoints/finall", "runs/mine/checkpoints/finall"])
def test_a_misspelt_checkpoint_is_refused_with_those_of_its_run(run, name):
    with pytest.raises(UsageError, match=r"has no checkpoint finall: `vlarl status runs/mine` shows its progress"):
        refuse_unknown(name)
    save(run, "final", 5)
    save(run, "step_000004", 4)
    (run / "checkpoints" / "ema").mkdir()
    (run / "checkpoints" / "ema" / "config.json").write_text("{}")
    for refuse, there in ((refuse_unknown, "ema, final, step_000004"), (resumed_checkpoint, "final, step_000004")):
        with pytest.raises(UsageError) as caught:
            refuse(name)
        said = f"the run runs/mine has no checkpoint finall: did you mean final? It has {there}."
        assert str(caught.value) == said


@pytest.mark.parametrize("option", ["policy.path", "policy.base", "lora.adapter"])
def test_a_configuration_that_starts_from_nothing_is_refused(run, option):
    save(run, "final", 5)
    section, _, field = option.partition(".")
    config = Config()
    refuse_early(config)
    part = getattr(config, section).model_copy(update={field: "mien"})
    with pytest.raises(UsageError, match=r"mien is not a checkpoint: .*Did you mean the run 'mine'"):
        refuse_early(config.model_copy(update={section: part}))


def test_a_run_that_is_deleted_between_listing_and_looking_does_not_fail_the_list(run, monkeypatch):
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *call: [Path("runs/gone/config.yaml"), *listed(*call)])
    assert list_runs("runs") == ["mine", "gone"]


@pytest.mark.parametrize("option", ["policy.path", "policy.base", "lora.adapter"])
def test_a_configuration_holds_the_checkpoint_of_a_run_that_it_names(run, option):
    final = save(run, "final", 5, "adapter_config.json")
    needed = {"lora.adapter": {"lora.enabled": True}, "policy.base": {"policy.path": "mine"}}
    given = {option: "mine"} | needed.get(option, {})
    section, _, field = option.partition(".")
    assert getattr(getattr(load_config(overrides=given), section), field) == str(final)


def test_demonstrations_may_start_from_a_run(run):
    final = save(run, "final", 5)
    config = load_config("tabletop_base", {"policy.path": "mine"}, schema=FinetuneConfig)
    assert config.policy.path == str(final)


def test_an_evaluation_of_a_run_has_the_options_of_the_run(run):
    save(run, "final", 5)
    request = eval_request("mine", {})
    assert (request.checkpoint, request.env.suite) == ("runs/mine/checkpoints/final", "tabletop_goal")


def test_how_far_a_run_has_come(run):
    assert run_progress(run) is None
    save(run, "step_000004", 4)
    save(run, "final", 5)
    damaged = save(run, "step_000009")
    (damaged / "trainer.json").write_text("{")
    assert run_progress(run) == RunProgress(5, 35, is_complete=True)
    assert run_progress(run, run / "checkpoints" / "step_000004") == RunProgress(4, 28, is_complete=True)


@pytest.mark.parametrize("env_steps", ["many", None, [1]])
def test_env_steps_that_are_no_number_count_as_none(run, env_steps):
    folder = save(run, "step_000002", 2)
    (folder / "trainer.json").write_text(json.dumps({"iteration": 2, "env_steps": env_steps}))
    assert run_progress(run) == RunProgress(2, 0, is_complete=True)
