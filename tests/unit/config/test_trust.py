"""A run's configuration is its user's where it is sealed; what any other one names is refused and shown."""

import os
import pwd
import re
import stat
import threading
from pathlib import Path

import pytest

from vlarl.cli import configured, main
from vlarl.cli import env as cli_env
from vlarl.config import load_config, to_yaml
from vlarl.config.schema import Config
from vlarl.config.trust import UntrustedError, effects_of, is_sealed, key_file, refuse_untrusted, seal_file, seals
from vlarl.errors import UsageError
from vlarl.evaluation.request import eval_request
from vlarl.observability.run_dir import RunDirectory

CODE = """
run: {name: first}
policy: {path: "builtin:tiny-oft"}
env: {suite: gym}
gym:
  env: "subprocess:call"
  kwargs: {args: touch owned, shell: true}
  instructions: [go]
eval: {states_per_task: 2}
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path, monkeypatch, home) -> RunDirectory:
    """A run of this user whose environment is code."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", "first")
    run.write_config(CODE)
    (run.checkpoints / "final").mkdir()
    return run


def train(*arguments: str) -> list[Config]:
    """The configurations that a command would train with."""
    calls: list[Config] = []

    def begin(config: Config, resume: Path | None) -> None:
        calls.append(config)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        configured.train(list(arguments), begin)
    return calls


def test_a_run_of_ones_own_is_resumed_and_evaluated_as_it_is(run):
    assert is_sealed(run.config_file)
    (config,) = train("--resume", "first")
    assert config.gym.env == "subprocess:call"
    assert eval_request(str(run.checkpoints / "final"), {}).gym.env == "subprocess:call"


@pytest.mark.parametrize("change", ["no seal", "edited", "another user's"])
def test_a_run_from_elsewhere_is_refused_until_it_is_trusted(run, change, capsys, monkeypatch, tmp_path):
    if change == "no seal":
        seal_file(run.config_file).unlink()
    elif change == "edited":
        run.config_file.write_text("# harmless?\n" + run.config_file.read_text())
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        RunDirectory.create("runs", "mine").write_config("run: {}\n")  # this user has a key, too
    checkpoint = str(run.checkpoints / "final")
    for command in (
        ["train", "--resume", "first", "--dry-run"],
        ["eval", checkpoint],
        ["train", str(run.config_file), "--dry-run"],
    ):
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "gym.env = 'subprocess:call': imports subprocess and makes call" in message
        assert "args='touch owned', shell=true" in message and "--trust" in message
    with pytest.raises(UntrustedError):
        load_config(run.config_file)
    (config,) = train("--resume", "first", "--trust")
    assert config.gym.env == "subprocess:call"
    assert eval_request(checkpoint, {}, trust=True).gym.env == "subprocess:call"
    assert not (tmp_path / "owned").exists()


def test_an_episode_is_replayed_only_of_ones_own_run(run, capsys):
    seal_file(run.config_file).unlink()
    episode = "gym-t00-s001-0000000000000001"
    assert main(["eval", str(run.checkpoints / "final"), "--episode", episode]) == 2
    assert "imports subprocess" in capsys.readouterr().err


def test_what_the_user_names_needs_no_trust(run):
    seal_file(run.config_file).unlink()
    checkpoint = str(run.checkpoints / "final")
    with pytest.raises(UntrustedError, match=r"gym.kwargs: passes \(args='touch owned', shell=true\) to mine:make"):
        eval_request(checkpoint, {"gym.env": "mine:make"})
    assert eval_request(checkpoint, {"gym.env": "mine:make", "gym.kwargs": {}}).gym.env == "mine:make"
    assert eval_request(checkpoint, {"env.suite": "tabletop_goal"}).gym.env is None
    (config,) = train("--resume", "first", "--gym.env", "mine:make", "--gym.kwargs", "{}")
    assert config.gym.env == "mine:make"


def test_the_arguments_of_a_foreign_run_reach_no_callable_unannounced(run):
    seal_file(run.config_file).unlink()
    checkpoint, named = str(run.checkpoints / "final"), {"gym.env": "python:mine.make"}
    with pytest.raises(UntrustedError) as refused:
        eval_request(checkpoint, named)
    assert "gym.kwargs: passes (args='touch owned', shell=true) to python:mine.make" in str(refused.value)
    assert "gym.env = " not in str(refused.value)
    assert eval_request(checkpoint, {**named, "gym.kwargs": {}}).gym.env == "python:mine.make"


def test_the_environment_of_a_foreign_run_is_checked_only_with_trust(run, capsys, monkeypatch):
    seal_file(run.config_file).unlink()
    checked: list[Config] = []

    def subject(config: Config) -> None:
        checked.append(config)
        raise UsageError("checked")

    monkeypatch.setattr(cli_env, "_subject", subject)
    assert main(["env", "check", str(run.config_file)]) == 2
    assert "add --trust" in capsys.readouterr().err and not checked
    assert main(["env", "check", str(run.config_file), "--trust"]) == 2
    assert capsys.readouterr().err == "error: checked\n"
    assert checked[0].gym.env == "subprocess:call"


def test_a_file_of_ones_own_is_a_source_as_any_other(run, tmp_path):
    copy = tmp_path / "mine.yaml"
    copy.write_text(run.config_file.read_text())
    assert load_config(copy).gym.env == "subprocess:call"


def test_a_foreign_run_without_code_is_resumed(run):
    run.config_file.write_text(to_yaml(load_config(overrides={"run.name": "first"})))
    assert train("--resume", "first")[0].env.suite == Config().env.suite


def test_a_trusted_run_is_sealed_when_it_is_written_again(run):
    text = run.config_file.read_text()
    seal_file(run.config_file).unlink()
    run.write_config(text)
    assert is_sealed(run.config_file)


def test_a_crash_between_seal_and_file_leaves_a_sealed_file(run):
    old = run.config_file.read_bytes()
    seal_file(run.config_file).write_text(seals(run.config_file, "run: {}\n"))
    assert is_sealed(run.config_file)
    run.config_file.write_text("run: {}\n")
    assert is_sealed(run.config_file)
    run.config_file.write_bytes(old + b"#")
    assert not is_sealed(run.config_file)


def test_foreign_content_is_not_sealed_beside_the_new(run):
    foreign = run.config_file.read_text() + "# foreign\n"
    run.config_file.write_text(foreign)
    run.write_config("run: {}\n")
    run.config_file.write_text(foreign)
    assert not is_sealed(run.config_file)


def test_the_key_is_the_users_alone(home, tmp_path):
    seals(tmp_path / "config.yaml", "")
    assert key_file().parent == home / "vlarl"
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600 and key_file().stat().st_size == 32
    assert [path.name for path in key_file().parent.iterdir()] == ["seal.key"]


def test_a_key_that_others_could_read_counts_as_none(run):
    key_file().chmod(0o644)
    assert not is_sealed(run.config_file)
    sections = load_config(run.config_file, trust=True).model_dump()
    with pytest.raises(UntrustedError, match=r"the key in \S+seal.key is not used: .* mode 600"):
        refuse_untrusted(run.config_file, sections, ())
    key_file().unlink()
    with pytest.raises(UntrustedError, match="there is no key in"):
        refuse_untrusted(run.config_file, sections, ())


def test_processes_that_start_together_have_one_key(home, tmp_path):
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(seals(tmp_path / "config.yaml", "x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and found[0]


@pytest.mark.parametrize(
    ("has_home", "reason"),
    [(True, "there is no key in "), (False, "there is no home folder for the key .*: set HOME or XDG_STATE_HOME")],
)
def test_without_a_key_nothing_is_sealed_and_trust_is_needed(tmp_path, monkeypatch, capsys, has_home, reason):
    (tmp_path / "file").write_text("")
    if has_home:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    else:  # a user that the system does not know, without HOME
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
        assert key_file() is None
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", "first")
    run.write_config(CODE)
    assert run.config_file.is_file() and not seal_file(run.config_file).exists()
    assert main(["train", "--resume", "first", "--dry-run"]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert train("--resume", "first", "--trust")


def test_a_relative_state_folder_is_ignored_as_the_rules_say(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    assert key_file() == Path(os.path.expanduser("~/.local/state/vlarl/seal.key"))


@pytest.mark.parametrize(
    ("overrides", "given", "said"),
    [
        ({"reward.source": "evil:reward"}, (), ["reward.source = 'evil:reward': imports evil and calls reward"]),
        ({"reward.source": "evil:reward"}, ("reward.source",), []),
        (
            {"reward.source": "combined", "reward.sources": ["sparse", "evil:f"]},
            (),
            ["reward.sources = 'evil:f': imports evil and calls f"],
        ),
        (
            {"reward.source": "remote", "reward.url": "http://evil/?t=1", "reward.headers_env": "HF_TOKEN"},
            (),
            [
                "reward.url = 'http://evil/?t=***': posts every episode to this address, with the content of the "
                "environment variable HF_TOKEN"
            ],
        ),
        (
            {"distributed.backend": "ray", "distributed.address": "evil:6379"},
            (),
            ["distributed.address = 'evil:6379': connects to this Ray cluster, which can run code here"],
        ),
        ({"distributed.backend": "ray", "distributed.address": "auto"}, (), []),
        (
            {"logging.wandb": True, "logging.wandb_entity": "evil"},
            (),
            ["logging.wandb = true: sends the run's metrics and configuration to the W&B project evil/vlarl"],
        ),
        ({"logging.wandb": True, "logging.wandb_mode": "offline"}, (), []),
        ({}, (), []),
    ],
)
def test_what_a_configuration_would_run(overrides, given, said):
    assert list(effects_of(load_config(overrides=overrides).model_dump(), given)) == said
