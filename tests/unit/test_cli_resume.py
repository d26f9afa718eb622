"""What is refused of `vlarl train --resume` before anything is loaded."""

from pathlib import Path

import pytest

from vlarl.cli import main
from vlarl.cli.configured import train
from vlarl.cli.resume import refuse_damaged
from vlarl.config.source.load import load_config, to_yaml
from vlarl.errors import UsageError
from vlarl.observability.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """runs/first, which has two checkpoints."""
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.create("runs", "first")
    directory.write_config(to_yaml(load_config(None, {"run.name": "first"})))
    for name in ("step_000002", "final"):
        (directory.checkpoints / name).mkdir()
        (directory.checkpoints / name / "trainer.json").write_text("{}")
    (directory.checkpoints / "ema").mkdir()
    return directory.path


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    return message


def test_a_configuration_that_is_cut_off_is_refused_wherever(run, capsys):
    """Missing options would get their defaults, and the run would continue as a different one."""
    text = (run / "config.yaml").read_text()
    lines = text.splitlines(keepends=True)
    for count in range(len(lines) - 1):
        (run / "config.yaml").write_text("".join(lines[:count]))
        with pytest.raises(UsageError, match="it is truncated"):
            refuse_damaged(run / "config.yaml")
    for count in (0, 1, len(lines) // 2, len(lines) - 2):
        (run / "config.yaml").write_text("".join(lines[:count]))
        message = failed(["--resume", "first", "--dry-run"], capsys)
        assert "runs/first/config.yaml is damaged: it is truncated" in message, count
        assert "--policy.path runs/first/checkpoints/<name>" in message and "restore it from a copy" in message
    (run / "config.yaml").write_text(text)
    assert main(["train", "--resume", "first", "--dry-run"]) == 0


def test_a_configuration_of_an_earlier_version_has_no_last_line(run, capsys):
    text = (run / "config.yaml").read_text()
    *lines, last = text.splitlines(keepends=True)
    assert last.startswith("# end of the configuration")
    (run / "config.yaml").write_text("".join(lines))
    assert main(["train", "--resume", "first", "--dry-run"]) == 0
    capsys.readouterr()
    (run / "config.yaml").write_text("".join(lines[:-1]))
    assert "truncated: distributed." in failed(["--resume", "first", "--dry-run"], capsys)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"trainer:\n  epochs: 3\n", "not the configuration of a run of `vlarl train`: it has 'trainer'"),
        (b"run: {\n", "it can't be read"),
        (b"\xff\xfe\x00", "it can't be read"),
        (b"- 1\n- 2\n", "config.yaml is damaged"),
    ],
)
def test_a_configuration_of_something_else_is_refused(run, capsys, content, says):
    (run / "config.yaml").write_bytes(content)
    assert says in failed(["--resume", "first"], capsys)


def test_from_names_a_checkpoint_of_the_run(run, capsys):
    called = []

    def run_training(config, resume, checkpoint=None):
        called.append((resume, checkpoint))
        raise KeyboardInterrupt

    for arguments in (["--from", "step_000002"], ["--from=final"], []):
        with pytest.raises(KeyboardInterrupt):
            train(["--resume", "first", *arguments], run_training)
    folder = Path("runs/first/checkpoints")
    assert called == [(folder.parent, folder / "step_000002"), (folder.parent, folder / "final"), (folder.parent, None)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "step_000002"], "--from step_000002: names a checkpoint of a run to resume; add --resume RUN"),
        (["--resume", "first", "--from"], "--from: needs the name of a checkpoint of the run, such as step_000002"),
        (["--resume", "first", "--from", "step_00002"], "did you mean step_000002? there are final, step_000002"),
        (["--resume", "first", "--from", "ema"], "has no checkpoint of that name to resume from"),
        (["--resume", "first", "--from", "../first"], "has no checkpoint of that name"),
    ],
)
def test_a_checkpoint_that_is_not_there(run, capsys, arguments, says):
    assert says in failed(arguments, capsys)
