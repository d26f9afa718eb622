"""What is refused before a run is made or announced; `--dry-run` says the same as the run would."""

import importlib.util
import sys
from pathlib import Path

import pytest

import vlarl
from vlarl.cli import main
from vlarl.config import load_config
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.reward_module import refuse_missing_module
from vlarl.errors import MissingExtraError, UsageError
from vlarl.run.preflight import refuse_early, refuse_unready


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(command: list[str], capsys) -> str:
    """What a refused command says; it announces nothing."""
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--run.name", "taken"], "the run runs/taken exists already"),
        (
            ["train", "--policy.path", "./nowhere"],
            "./nowhere is not a checkpoint: there is no folder or run of that name",
        ),
        (["train", "--policy.path", "empty"], "empty is not a checkpoint: it holds no config.json"),
        (
            ["train", "--policy.path", "taken2"],
            "taken2 is not a checkpoint: there is no folder or run of that name. runs/ holds no runs with a checkpoint. Give",
        ),
        (["train", "--lora.adapter", "/no/where"], "/no/where is not a checkpoint: there is no folder"),
        (["train", "metaworld_grpo"], "run: vlarl finetune metaworld_base --run.name metaworld_base"),
        (["train", "--reward.source", "no_module:f"], "cannot import the module 'no_module' of 'no_module:f'"),
        (["train", "--reward.source", "no_module.sub:f"], "No module named 'no_module'"),
        (
            ["train", "--curriculum.mode", "adaptive", "--curriculum.start_from", "no.json"],
            "no.json (No such file or directory): curriculum.start_from must name a run's folder",
        ),
        (["finetune", "--run.name", "taken"], "the run runs/taken exists already"),
        (["finetune", "--policy.path", "./nowhere"], "./nowhere is not a checkpoint"),
        (["finetune", "--demos.path", "nowhere"], "nowhere is not a directory: name the folder of an RLDS dataset"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses_before_it_is_announced(command, message, work, capsys):
    (work / "runs" / "taken").mkdir(parents=True)
    (work / "runs" / "taken" / "config.yaml").touch()
    (work / "mine.py").write_text("raise RuntimeError('nothing of it is run')")
    (work / "empty").mkdir()
    before = sorted(work.rglob("*"))
    said = answer([*command, "--dry-run"], capsys)
    assert message in said
    assert answer(command, capsys) == said
    assert sorted(work.rglob("*")) == before, "nothing is left behind"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--distributed.backend", "ray"],
            "ray is not installed; in your clone of vlarl run: pip install -c constraints.txt -e '.[cluster]'",
        ),
        (
            ["--logging.wandb"],
            "wandb is not installed; in your clone of vlarl run: pip install -c constraints.txt -e '.[wandb]'",
        ),
        (["--env.suite", "libero_goal", "--policy.path", "me/mine"], "LIBERO_ASSETS: "),
        (["--env.suite", "metaworld_mt10", "--policy.path", "me/mine"], "metaworld is not installed"),
    ],
)
def test_what_is_not_ready_is_said_before_the_run_is_announced(flags, message, work, capsys, monkeypatch):
    for package in ("ray", "wandb", "metaworld"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setenv("LIBERO_ASSETS", str(work / "no assets"))
    assert message in answer(["train", *flags], capsys)
    assert list(work.iterdir()) == []
    assert main(["train", *flags, "--dry-run"]) == 0, "the run may be on another machine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reward.source", "mine:typo"], "'mine' has no function 'typo'; did you mean mine:typed?"),
        (["--reward.source", "broken:f"], "it raised RuntimeError: no luck (broken.py, line 1)"),
        (["--run.device", "cuda:77"], "run.device: 'cuda:77' can't be used here"),
        (
            ["--logging.wandb"],
            "logging.wandb: there is no login of Weights & Biases on this machine: set the environment",
        ),
    ],
)
def test_what_takes_long_to_look_at_is_said_after_the_first_line_and_leaves_nothing(
    flags, message, work, capsys, monkeypatch
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(work / "home"))
    monkeypatch.setenv("NETRC", str(work / "netrc"))
    (work / "mine.py").write_text("def typed(trajectory): return 0.0")
    (work / "broken.py").write_text("raise RuntimeError('no luck')")
    sys.modules.pop("mine", None)
    assert main(["train", *flags, "--run.name", "new"]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("run runs/new: ") and message in captured.err
    assert not (work / "runs").exists()
    sys.modules.pop("mine", None)
    assert main(["train", *flags, "--dry-run"]) == 0, "the run may be on another machine"
    assert "mine" not in sys.modules, "a dry run imports nothing"


def test_python_is_refused_at_the_same_point(work):
    with pytest.raises(UsageError, match="nowhere is not a checkpoint"):
        vlarl.train("tabletop_grpo", {"policy.path": "./nowhere"})
    assert list(work.iterdir()) == []


def test_a_resumed_run_has_its_folder_and_its_weights(work):
    config = load_config("tabletop_grpo", {"run.name": "first", "policy.path": "./gone"})
    (work / "runs" / "first" / "logs").mkdir(parents=True)
    (work / "runs" / "first" / "config.yaml").touch()
    refuse_unready(config, is_new=False)
    with pytest.raises(UsageError, match="exists already"):
        refuse_early(config)


def test_workers_import_the_reward_that_they_score_with():
    reward = {"reward.source": "only_there:f", "distributed.backend": "ray", "distributed.num_reward_workers": 1}
    refuse_early(load_config("tabletop_cluster", reward))
    with pytest.raises(UsageError, match="cannot import the module 'only_there'"):
        refuse_early(load_config("tabletop_cluster", {"reward.source": "only_there:f"}))


def test_what_is_there_is_accepted(work):
    (work / "data").mkdir()
    (work / "data" / "dataset_info.json").write_text("{}")
    refuse_early(load_config("tabletop_base", {"demos.path": "data"}, schema=FinetuneConfig))
    refuse_unready(load_config("tabletop_grpo", {"run.device": "cpu", "run.name": "new"}))
    refuse_early(load_config("libero_spatial_grpo_oft"))  # a hub id


@pytest.mark.parametrize(
    ("source", "is_there"),
    [
        ("package.module:f", True),
        ("package.other:f", True),  # not known: the package may say where its parts are
        ("namespace.deeper.module:f", True),
        ("elsewhere:f", False),
        ("elsewhere.module:f", False),
        ("sys:exit", True),
        (".module:f", True),  # not known
        ("os.path:join", True),
        ("__main__:f", True),
    ],
)
def test_modules_are_found_without_being_run(source, is_there, work):
    (work / "package").mkdir()
    (work / "namespace" / "deeper").mkdir(parents=True)
    for name in ("__init__.py", "module.py"):
        (work / "package" / name).write_text("raise RuntimeError('it was run')")
    if is_there:
        refuse_missing_module(source)
        return
    with pytest.raises(UsageError, match="Run from the folder that holds it, or put that folder on PYTHONPATH"):
        refuse_missing_module(source)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError):
        refuse_unready(load_config("tabletop_cluster"))


def test_a_dashboard_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp_cors" else found(name))
    config = load_config("tabletop_grpo", {"distributed.backend": "ray", "distributed.dashboard": True})
    with pytest.raises(
        UsageError, match=r"Ray is installed without its dashboard; run: pip install 'ray\[default\]==\d"
    ):
        refuse_unready(config)
