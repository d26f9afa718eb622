"""Paths are absolute once a configuration is loaded, and short when they are printed."""

from pathlib import Path

import pytest

from vlarl.cli import configured, main
from vlarl.config import FinetuneConfig, load_config, to_yaml
from vlarl.config.paths import absolute, brief, briefly, located
from vlarl.config.schema import Config
from vlarl.observability.run_dir import RunDirectory


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """The working folder, beside the home folder."""
    (tmp_path / "work" / "weights").mkdir(parents=True)
    (tmp_path / "home" / "weights").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_paths_of_a_loaded_configuration_are_absolute(work):
    given = {
        "run.root": "~/runs",
        "policy.path": "weights",
        "lora.adapter": "~/weights",
        "env.assets": "assets",
        "env.suite": "libero_spatial",
        "curriculum.mode": "adaptive",
        "curriculum.start_from": "../old/curriculum.json",
    }
    config = load_config(overrides=given)
    home = work.parent / "home"
    assert config.run.root == str(home / "runs")
    assert config.policy.path == str(work / "weights")
    assert config.lora.adapter == str(home / "weights")
    assert config.env.assets == str(work / "assets")
    assert config.curriculum.start_from == str(work.parent / "old" / "curriculum.json")
    assert load_config("tabletop_base", {"run.root": "runs"}, schema=FinetuneConfig).run.root == str(work / "runs")


@pytest.mark.parametrize("name", ["builtin:tiny-oft", "init:tiny-oft", "openvla/openvla-7b", "missing"])
def test_names_stay_names(work, name):
    config = Config(policy=Config().policy.model_copy(update={"path": name}))
    assert located(config).policy.path == name


def test_a_link_is_followed_before_two_dots(work):
    (work.parent / "far" / "disk").mkdir(parents=True)
    (work / "link").symlink_to(work.parent / "far" / "disk")
    assert absolute("weights/../runs") == str(work / "runs")
    assert absolute("link/../runs") == str(work / "link" / ".." / "runs")


def test_printed_paths_are_short(work):
    assert brief(work / "runs" / "x") == "runs/x"
    assert brief(work.parent / "home") == str(work.parent / "home")
    assert brief("runs") == "runs"
    assert briefly(load_config()).run.root == "runs"


def test_a_dry_run_prints_the_paths_as_they_were_given(work, capsys):
    assert main(["train", "--run.root", "here", "--dry-run"]) == 0
    assert "root: here\n" in capsys.readouterr().out


def test_a_run_is_resumed_from_another_folder(work, monkeypatch):
    run = RunDirectory.create("runs", "first")
    config = load_config(overrides={"run.name": "first", "policy.path": "weights"})
    run.write_config(to_yaml(config))
    monkeypatch.chdir(work.parent)
    seen = []
    with pytest.raises(RuntimeError):
        configured.train(["--resume", "work/runs/first"], lambda config, folder: _stop(seen, config))
    assert seen[0].run.root == str(work / "runs") and seen[0].policy.path == str(work / "weights")


def test_a_run_under_the_home_folder_is_found_by_its_name(work, capsys):
    RunDirectory.create(Path("~/runs").expanduser(), "first").write_config("run: {}\n")
    assert main(["status", "first", "--run.root", "~/runs"]) == 0
    assert str(work.parent / "home" / "runs" / "first") in capsys.readouterr().out
    assert main(["status", "--run.root", "~/runs"]) == 0
    assert "first" in capsys.readouterr().out


def _stop(seen, value):
    seen.append(value)
    raise RuntimeError
