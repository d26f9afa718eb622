"""Commands, their exit codes and what they print. Training itself is a fake here."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vlarl import __version__
from vlarl.cli import COMMANDS, Command, configured, main
from vlarl.config import Config, load_config, to_yaml
from vlarl.config.training_data import TrainedOn, TrainingData, write_training_data
from vlarl.errors import MissingExtraError, UsageError, VlarlError
from vlarl.observability.run_dir import RunDirectory


@dataclasses.dataclass
class Summary:
    run_dir: Path
    success_before: float | None = 0.55
    success_after: float | None = 0.925
    report: Path | None = None
    interrupted: bool = False


class FakeTraining:
    """Records the configuration that it should train and returns a summary."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.calls: list[tuple[Config, Path | None]] = []
        self.checkpoint: Path | None = None

    def __call__(self, config: Config, resume: Path | None, checkpoint: Path | None = None) -> Summary:
        self.calls.append((config, resume))
        self.checkpoint = checkpoint
        return self.summary


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def saved_run(work) -> Path:
    run = work / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(load_config(overrides={"run.name": "first", "run.iterations": 5})))
    return run


def failed(arguments, capsys, code=2) -> str:
    """The message of a command that must fail without a traceback."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").rstrip("\n")


def test_overview_and_version(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        assert "usage: vlarl COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vlarl {__version__}\n"


def test_unknown_command(capsys):
    message = failed(["tran"], capsys)
    assert message.startswith("unknown command 'tran'; did you mean 'vlarl train'? Commands: train, eval, ")


def test_train_calls_the_loop_once_with_the_resolved_configuration(work, capsys):
    trained_on(work, TrainingData())
    training = FakeTraining(Summary(work / "run"))
    assert configured.train(["tabletop_ppo", "--optim.lr", "1e-5", "--seed", "3"], training) == 0
    ((config, resume),) = training.calls
    assert resume is None and config.optim.lr == 1e-5 and config.algorithm.name == "ppo"
    assert config.run.name is not None and config.run.name.startswith("tabletop_ppo_seed3_20")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("run runs/tabletop_ppo_seed3_20")
    assert ": preset tabletop_ppo, policy builtin:tiny-oft, suite tabletop_spatial, device c" in first
    assert rest == ["greedy success on unseen initial states: 55.0% → 92.5%", "checkpoint: run/checkpoints/final"]


def test_the_first_line_is_printed_before_training_starts(work, capsys):
    def training(config: Config, resume: Path | None) -> Summary:
        line, note = capsys.readouterr().out.splitlines()
        assert line == ("run mine/a: preset libero_spatial_grpo_oft, policy org/model, suite tabletop_goal, device cpu")
        assert note.startswith("note: ") and note.endswith("add --policy.decoder parallel")
        return Summary(work / "run")

    flags = ["--run.name", "a", "--run.root", "mine", "--policy.path", "org/model", "--env.suite", "tabletop_goal"]
    assert configured.train([*flags, "--run.device", "cpu"], training) == 0


def test_the_closing_lines_are_in_the_log(work, capsys):
    (work / "run" / "logs").mkdir(parents=True)
    assert configured.train([], FakeTraining(Summary(work / "run"))) == 0
    closing = capsys.readouterr().out.splitlines()[1:]
    logged = (work / "run" / "logs" / "train.log").read_text().splitlines()
    assert closing and [line.partition(": ")[2] for line in logged] == closing


def trained_on(work: Path, data: TrainingData) -> None:
    folder = work / "run" / "checkpoints" / "final"
    folder.mkdir(parents=True)
    write_training_data(folder, data)


def test_the_last_line_says_what_was_measured(work, capsys):
    flags = ["--eval.temperature", "1", "--env.protocol", "benchmark"]
    own = TrainedOn(by="train", suite="tabletop_spatial", protocol="benchmark", states=tuple(range(30, 50)))
    trained_on(work, TrainingData((own,)))
    assert configured.train(flags, FakeTraining(Summary(work / "run"))) == 0
    _, first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "sampled success on the training's own initial states: 55.0% → 92.5%"
    assert second.startswith(
        "warning: 200 of 200 episodes begin from initial states that this run's policy was trained"
    )


def demonstrated(**fields: object) -> TrainingData:
    return TrainingData((TrainedOn(by="finetune", suite="tabletop_spatial", **fields),))


@pytest.mark.parametrize(
    ("data", "where", "warning"),
    [
        (demonstrated(task_ids=(0,), states=(30, 31)), "initial states, some of which were trained on", "2 of 200"),
        (demonstrated(states=tuple(range(50))), "the training's own initial states", "200 of 200"),
        (demonstrated(), "initial states that may have been trained on", "this run's policy was trained on demonstr"),
        (
            TrainingData(unknown=("a/b",)),
            "initial states that may have been trained on",
            "this run's policy comes from",
        ),
        (None, "initial states that may have been trained on", "this run's policy does not say which initial states"),
    ],
)
def test_states_are_called_unseen_only_where_that_is_known(work, capsys, data, where, warning):
    if data is not None:
        trained_on(work, data)
    assert configured.train([], FakeTraining(Summary(work / "run"))) == 0
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first == f"greedy success on {where}: 55.0% → 92.5%" and second.startswith(f"warning: {warning}")


def test_a_given_name_and_a_file_are_kept(work):
    (work / "mine.yaml").write_text("optim:\n  lr: 2e-5\n")
    training = FakeTraining(Summary(work))
    assert configured.train(["--run.name", "mine.yaml", "--use-wandb", "mine.yaml", "--seed", "1"], training) == 0
    ((config, _),) = training.calls
    assert (config.run.name, config.optim.lr, config.logging.wandb) == ("mine.yaml", 2e-5, True)


def test_an_interrupted_run_exits_130_and_says_how_to_go_on(work, capsys):
    training = FakeTraining(Summary(Path("runs/x"), success_after=None, interrupted=True))
    assert configured.train([], training) == 130
    assert capsys.readouterr().out.splitlines()[1:] == [
        "greedy success before training: 55.0%; there is no later evaluation",
        "interrupted and saved; resume with: vlarl train --resume runs/x",
    ]


@pytest.mark.parametrize("run", ["first", "runs/first", "--resume=first"])
def test_resume_reads_the_runs_configuration_and_flags_may_change_it(saved_run, run):
    training = FakeTraining(Summary(saved_run))
    resume = [run] if run.startswith("--") else ["--resume", run]
    assert configured.train([*resume, "--run.iterations", "9"], training) == 0
    ((config, folder),) = training.calls
    assert folder is not None and folder.resolve() == saved_run
    assert config == load_config(overrides={"run.name": "first", "run.iterations": 9})


def test_resume_of_unknown_runs_lists_those_there_are(saved_run, capsys):
    assert failed(["train", "--resume", "frist"], capsys) == (
        "no run 'frist'; did you mean 'first'? Runs in runs/, newest first: first"
    )
    message = "no run 'x': empty/ holds no runs. `vlarl train` makes one"
    for root in ("--run.root", "--root"):
        assert failed(["train", "--resume", "x", root, "empty"], capsys).startswith(message)


def save_counters(run: Path, name: str, **counters: object) -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps({"env_steps": 100, "unfinished": {}} | counters))
    return folder


@pytest.mark.parametrize("name", ["first/checkpoints/step_000002", "runs/first/checkpoints/step_000002"])
def test_a_checkpoint_in_a_run_is_resumed_from(saved_run, name, capsys):
    save_counters(saved_run, "final", iteration=5)
    checkpoint = save_counters(saved_run, "step_000002", iteration=2)
    training = FakeTraining(Summary(saved_run))
    assert configured.train(["--resume", name], training) == 0
    ((config, resume),) = training.calls
    assert resume is not None and resume.resolve() == saved_run and config.run.name == "first"
    assert training.checkpoint is not None and training.checkpoint.resolve() == checkpoint
    assert capsys.readouterr().out.startswith("run runs/first: policy ")


def test_a_checkpoint_without_the_state_of_its_training_cannot_be_resumed_from(saved_run, capsys):
    save_counters(saved_run, "step_000002", iteration=2)
    (saved_run / "checkpoints" / "ema").mkdir()
    message = failed(["train", "--resume", "first/checkpoints/ema"], capsys)
    assert message.startswith("runs/first/checkpoints/ema cannot be resumed from: it holds a policy without")
    assert message.endswith("Checkpoints that have it: step_000002.")


def test_a_finished_run_says_that_it_is_and_how_to_go_on(saved_run, capsys):
    save_counters(saved_run, "final", iteration=5)
    training = FakeTraining(Summary(saved_run))
    assert configured.train(["--resume", "first"], training) == 0
    assert capsys.readouterr().out == (
        "the run runs/first has done 5 iterations, all of run.iterations = 5: it is finished. To train longer: "
        "vlarl train --resume runs/first --run.iterations 10\n"
    )
    assert training.calls == []
    assert configured.train(["--resume", "first", "--run.iterations", "6"], training) == 0
    assert len(training.calls) == 1


@pytest.mark.parametrize(
    ("flags", "state", "no_effect"),
    [
        (["--optim.lr", "1e-5"], "5 iterations, all of run.iterations = 5: ", "--optim.lr"),
        (["--run.iterations", "3"], "5 iterations, more than run.iterations = 3: ", "--run.iterations"),
    ],
)
def test_flags_of_a_finished_run_are_not_dropped(saved_run, capsys, flags, state, no_effect):
    save_counters(saved_run, "final", iteration=5)
    before = (saved_run / "config.yaml").read_bytes()
    message = failed(["train", "--resume", "first", *flags], capsys)
    assert message.startswith(f"the run runs/first has done {state}nothing is left to do, so {no_effect} would have no")
    assert "vlarl train --resume runs/first --run.iterations " in message
    assert (saved_run / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("counters", [{"iteration": 5, "unfinished": {"a": 1.0}}, {"iteration": 4}])
def test_a_run_that_has_something_left_to_do_is_resumed(saved_run, counters):
    save_counters(saved_run, "step_000005", **counters)
    training = FakeTraining(Summary(saved_run))
    assert configured.train(["--resume", "first"], training) == 0 and len(training.calls) == 1


def test_a_run_that_has_used_up_its_environment_steps_is_finished(saved_run, capsys):
    config = load_config(overrides={"run.name": "first", "run.iterations": 5, "run.total_env_steps": 100})
    (saved_run / "config.yaml").write_text(to_yaml(config))
    save_counters(saved_run, "final", iteration=2)
    assert configured.train(["--resume", "first"], FakeTraining(Summary(saved_run))) == 0
    printed = capsys.readouterr().out
    assert "has used up its 100 environment steps" in printed and "--run.total_env_steps 200" in printed


def test_a_dry_run_says_what_it_has_not_checked(work, capsys):
    (work / "mine.py").write_text("raise RuntimeError('a dry run has imported it')")
    flags = ["--policy.path", "some/where", "--reward.source", "mine:judge", "--env.suite", "libero_goal"]
    assert configured.train(["--dry-run", *flags]) == 0
    unchecked = capsys.readouterr().out.partition("# not checked here\n")[2].splitlines()
    assert unchecked == [
        "# the files of policy.path: vlarl doctor --model some/where",
        "# the code of the reward: mine:judge",
        "# the simulator: vlarl doctor",
        "# the device: vlarl doctor",
        "# its memory: vlarl doctor --model some/where",
    ]


def test_a_dry_run_says_that_it_has_not_compared_adapter_and_policy(work, capsys):
    assert configured.train(["--dry-run", "--policy.path", "some/where", "--lora.adapter", "some/lora"]) == 0
    assert "# whether lora.adapter was trained on policy.path\n" in capsys.readouterr().out


def test_a_dry_run_refuses_a_run_that_is_going_on(saved_run, capsys):
    with RunDirectory(saved_run).lock():
        assert "runs/first is in use by another process" in failed(["train", "--resume", "first", "--dry-run"], capsys)
    assert configured.train(["--resume", "first", "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [([], True), (["--env.suite", "tabletop_spatial"], False), (["--env.suite", "tabletop_goal"], False)],
)
def test_a_policy_of_another_suite_than_the_presets_is_noted(saved_run, capsys, flags, is_said):
    config = load_config(overrides={"run.name": "first", "env.suite": "tabletop_goal"})
    (saved_run / "config.yaml").write_text(to_yaml(config))
    (save_counters(saved_run, "final", iteration=5) / "config.json").write_text("{}")
    assert configured.train(["--policy.path", "first", "--dry-run", *flags]) == 0
    note = "# policy.path was trained on tabletop_goal, but this run is on tabletop_spatial: --env.suite tabletop_goal"
    assert (note in capsys.readouterr().out) is is_said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume: needs the name or folder of a run, or a checkpoint in it"),
        (["--resume", "first", "tabletop_ppo"], "--resume reads the run's own configuration; leave out tabletop_ppo"),
        (["--resume", "first", "--seed", "4"], "run.seed = 4: a resumed run keeps its seed, 0; leave the flag out"),
        (
            ["--resume", "first", "--name", "b"],
            "run.name = 'b': a resumed run keeps its name, 'first'; leave the flag out",
        ),
        (
            ["--resume", "first", "--policy.path", "elsewhere"],
            f"policy.path = 'elsewhere': a resumed run keeps its path, {load_config().policy.path!r}; leave the flag out",
        ),
        (["a.yaml", "b.yaml"], "one preset or file is enough; got a.yaml, b.yaml"),
        (["--lr", "1"], "--lr: unknown option; did you mean --optim.lr or --critic.lr?"),
        (["--rseume", "first"], "--rseume: unknown option; did you mean --resume?"),
        (["--quxes", "first"], "--quxes: unknown option; sections: " + ", ".join(Config.model_fields)),
        (["nothing.yaml"], "no file nothing.yaml; presets: "),
    ],
)
def test_bad_requests_exit_2_and_write_nothing(saved_run, capsys, arguments, message):
    before = sorted(Path().rglob("*"))
    assert failed(["train", *arguments], capsys).startswith(message)
    assert sorted(Path().rglob("*")) == before


def test_help_of_train_lists_presets_options_and_aliases(capsys):
    assert main(["train", "--optim.lr", "x", "--help"]) == 0
    text = capsys.readouterr().out
    for part in (
        "tabletop_ppo_openvla             Toy: PPO with",
        "--resume RUN",
        "--optim.lr ",
        "--task-suite,",
        "Learning rate of",
        "decision   one call of the policy",
        "group      several episodes of one task",
        "engine     what runs the policy",
        "iteration  one round",
    ):
        assert part in text
    assert main(["finetune", "--help"]) == 0
    text = capsys.readouterr().out
    assert "tabletop_base_openvla " in text and "--demos.close_high" in text and "--resume RUN" in text
    assert "--detach" not in text and "--optim.steps 20000" in text


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UsageError("the run exists"), 2, "error: the run exists\n"),
        (VlarlError("went wrong"), 1, "error: went wrong\n"),
        (
            MissingExtraError("wandb", "wandb"),
            2,
            "error: wandb is not installed; in your clone of vlarl run: pip install -c constraints.txt -e '.[wandb]'\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_messages_and_exit_codes(monkeypatch, capsys, error, code, printed):
    def run(arguments):
        raise error

    monkeypatch.setitem(COMMANDS, "broken", Command(run, "", ""))
    assert main(["broken"]) == code
    assert capsys.readouterr().err == printed


def test_a_defect_is_not_hidden(monkeypatch):
    def run(arguments):
        raise ZeroDivisionError

    monkeypatch.setitem(COMMANDS, "broken", Command(run, "", ""))
    with pytest.raises(ZeroDivisionError):
        main(["broken"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "x"], "argument what: invalid choice: 'x'"),
        (["bench"], "say what to measure: `vlarl bench env` "),
        (["report", "x"], "no run 'x': runs/ holds no runs. `vlarl train` makes one"),
        (["report"], "name a run: `vlarl report RUN` takes the name or the folder of a run. runs/ holds none"),
    ],
)  # fmt: skip
def test_bad_arguments_of_the_other_commands(work, capsys, arguments, message):
    assert failed(arguments, capsys).startswith(message)


def test_the_process_ends_with_the_exit_code():
    done = subprocess.run([sys.executable, "-m", "vlarl.cli", "train", "--lr", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --lr: unknown option; did you mean --optim.lr or --critic.lr?\n"


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m vlarl.cli train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("usage: vlarl train") and done.stderr == ""


@pytest.mark.parametrize("code", [0, 3, "enough"])
def test_an_environment_that_exits_is_a_failure_with_a_message(code, monkeypatch, capsys):
    def run(arguments):
        sys.exit(code)

    monkeypatch.setitem(COMMANDS, "broken", Command(run, "", ""))
    assert main(["broken"]) == 1
    assert f"error: code that vlarl calls called sys.exit({code!r})" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["report", "--help"])  # argparse's own way to end
    assert refused.value.code == 0 and "usage: vlarl report" in capsys.readouterr().out


def test_argparse_ends_the_program_where_sys_exit_is_wrapped_as_wandb_does(monkeypatch, capsys):
    wrapper = compile("def exit_(code=0):\n    original(code)\n", "wandb/sdk/lib/exit_hooks.py", "exec")
    names = {"original": sys.exit}
    exec(wrapper, names)
    monkeypatch.setattr(sys, "exit", names["exit_"])
    with pytest.raises(SystemExit) as refused:
        main(["report", "--help"])
    assert refused.value.code == 0


def test_a_disk_that_is_full_and_a_text_without_end_are_short_messages(monkeypatch, capsys):
    def full(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "/nowhere/video.mp4")

    def long(arguments):
        raise VlarlError("x" * 50_000_000)

    monkeypatch.setitem(COMMANDS, "full", Command(full, "", ""))
    assert main(["full"]) == 1
    message = capsys.readouterr().err
    assert (
        message.startswith("error: cannot write /nowhere/video.mp4: the disk is full (") and "Traceback" not in message
    )
    monkeypatch.setitem(COMMANDS, "long", Command(long, "", ""))
    assert main(["long"]) == 1 and len(capsys.readouterr().err) < 21_000

    def other(arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setitem(COMMANDS, "other", Command(other, "", ""))
    with pytest.raises(OSError, match="Input/output"):
        main(["other"])
