"""Commands and Python in the first pages of the docs work: commands are dry-run, Python is run up to training."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import vlarl
import vlarl.cli.evaluate
import vlarl.evaluation.run
import vlarl.loop
from vlarl.cli import main
from vlarl.config.source.load import to_yaml
from vlarl.config.training_data import local_folder
from vlarl.envs.gym.probe import probe
from vlarl.envs.gym.source import make_env
from vlarl.types import EvalResult

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?P<name>\w+\.(py|yaml))\n")
RUNS = ("A", "B", "NAME", "first", "goals")  # that commands name
LEFT_OUT = ("…", "--detach", "--dry-run")


def blocks(page, *languages):
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block["text"] for block in BLOCK.finditer(text) if block["language"] in languages]


def commands(page):
    lines = [line for block in blocks(page, "", "bash") for line in block.replace("\\\n", " ").splitlines()]
    starts = ("vlarl train", "vlarl finetune", "vlarl eval")
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(starts)]


COMMANDS = [
    pytest.param(words, id=f"{page}: {' '.join(words)}")
    for page in ("README.md", "docs/quickstart.md", "docs/coming-from.md")
    for words in commands(page)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the pages show, and runs of the names that they use."""
    monkeypatch.chdir(tmp_path)
    for page in ("docs/quickstart.md", "docs/adding-an-env.md"):
        for block in blocks(page, "python", "yaml"):
            if name := FILE.match(block):
                (tmp_path / name["name"]).write_text(block, encoding="utf-8")
    for name in RUNS:
        checkpoints = tmp_path / "runs" / name / "checkpoints"
        for checkpoint in ("final", "best_return", "step_000005", "step_000010"):
            (checkpoints / checkpoint).mkdir(parents=True)
            for file in local_folder("builtin:tiny-openvla").iterdir():
                (checkpoints / checkpoint / file.name).symlink_to(file)
            (checkpoints / checkpoint / "trainer.json").write_text('{"iteration": 5}')
        config = to_yaml(vlarl.load_config("tabletop_grpo", {"run.name": name}))
        (checkpoints.parent / "config.yaml").write_text(f"{config}# end of the configuration\n", encoding="utf-8")
    return tmp_path


class EvaluationReachedError(Exception):
    pass


def evaluation_reached(*arguments):
    raise EvaluationReachedError


@pytest.mark.parametrize("words", COMMANDS)
def test_a_printed_command_is_taken(words, folder, monkeypatch, capsys):
    if "--help" in words:
        words = [words[0], "--help"]
    elif words[0] == "eval":
        monkeypatch.setattr(vlarl.cli.evaluate, "_run", evaluation_reached)
        with pytest.raises(EvaluationReachedError):
            main(words)
        return
    else:
        words = [*(word for word in words if word not in LEFT_OUT), "--dry-run"]
        for flag in ("--run.name", "--output_dir"):
            if flag in words:  # a run of its own
                shutil.rmtree(folder / "runs" / Path(words[words.index(flag) + 1]).name, ignore_errors=True)
    assert main(words) == 0, capsys.readouterr().err


def test_the_pages_have_commands():
    assert len(COMMANDS) > 25
    assert {param.values[0][0] for param in COMMANDS} == {"train", "finetune", "eval"}


def test_the_python_page_runs_as_printed(folder, monkeypatch):
    """Training and evaluation are skipped, except the checks of an environment before a run starts."""
    trained = []

    def train(config, resume=None, checkpoint=None, callbacks=None):
        if config.env.suite == "gym":
            suite = probe(make_env(config.gym, config.env.max_steps), config.gym, config.env.max_steps)
            assert suite.action_dim == 7 or config.gym.actions, "the policy's actions have seven dimensions"
        trained.append((config, resume))
        return SimpleNamespace(run_dir=Path("first"))

    monkeypatch.setattr(vlarl.loop, "train", train)
    monkeypatch.setattr(
        vlarl.evaluation.run, "run_evaluation", lambda *arguments: SimpleNamespace(result=EvalResult(()))
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "reach_env", raising=False)
    names = {"__name__": "__main__"}
    for block in blocks("docs/python.md", "python"):
        exec(block, names)  # noqa: S102
    assert [config.env.suite for config, _ in trained] == ["tabletop_spatial"] * 2 + ["gym"] + ["tabletop_spatial"] * 2
    assert trained[-1][1] == Path("runs/first")
