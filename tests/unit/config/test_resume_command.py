"""How a run is resumed: a command, or a call in Python that gives its callables again; and that the call is accepted."""

import os

import gymnasium
import pytest

import vlarl
import vlarl.loop
from vlarl.config.resume_command import resume_command
from vlarl.config.source.load import load_config, to_yaml
from vlarl.errors import UsageError
from vlarl.observability.run_dir import END_OF_CONFIG, RunDirectory


def quick(trajectory):
    return float(trajectory.success)


def make_env():
    return gymnasium.make("CartPole-v1")


IN_GYM = {"env.suite": "gym", "gym.env": make_env, "gym.instructions": ["balance"], "policy.path": "init:tiny-oft"}
COMBINED = {"reward.source": "combined", "reward.sources": ["sparse", quick], "reward.weights": [1.0, 0.5]}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that makes the folder of a run with these options and a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def save(options):
        run = tmp_path / "my runs" / "mine"
        (run / "checkpoints" / "step_000002").mkdir(parents=True)
        (run / "checkpoints" / "step_000002" / "trainer.json").write_text('{"iteration": 2}')
        config = load_config(
            vlarl.Config() if "gym.env" in options else None, {"run.name": "mine", "run.root": "my runs", **options}
        )
        (run / "config.yaml").write_text(f"{to_yaml(config)}{END_OF_CONFIG}\n")
        return run

    return save


@pytest.mark.parametrize(
    ("options", "start", "command"),
    [
        ({}, "", "vlarl train --resume 'my runs/mine'"),
        ({"run.iterations": 9}, "step_000002", "vlarl train --resume 'my runs/mine' --from step_000002 --run.iterations 9"),
    ],
)  # fmt: skip
def test_a_run_by_names_alone_is_resumed_by_a_command(saved, options, start, command):
    assert resume_command(saved({}), options, start) == command


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"reward.source": quick}, 'vlarl.train(resume="my runs/mine", reward=quick)'),
        ({"reward.source": lambda t: 1.0}, 'vlarl.train(resume="my runs/mine", reward=...)'),
        (IN_GYM, 'vlarl.train(resume="my runs/mine", env=make_env)'),
        (IN_GYM | {"reward.source": quick}, 'vlarl.train(resume="my runs/mine", env=make_env, reward=quick)'),
        (COMBINED, 'vlarl.train(resume="my runs/mine", overrides={"reward.sources": ["sparse", quick]})'),
    ],
)
def test_callables_are_given_again_by_a_call_that_is_accepted(saved, monkeypatch, options, call):
    run = saved(options)
    assert resume_command(run) == call
    resumed = []
    monkeypatch.setattr(vlarl.loop, "train", lambda config, *rest: resumed.append((config, *rest)))
    eval(call.replace("...", "quick"))
    eval(resume_command(run, {"run.iterations": 90}, "step_000002").replace("...", "quick"))
    (config, folder, checkpoint, _), (longer, _, named, _) = resumed
    assert folder.resolve() == run and checkpoint is None
    assert named.resolve() == run / "checkpoints" / "step_000002" and longer.run.iterations == 90
    given = [each.function for each in (*config.reward.given.values(), *config.gym.given.values())]
    assert len(given) == call.count("=quick") + call.count("=make_env") + call.count("=...") + call.count(" quick]")
    assert given and set(given) <= {quick, make_env}


def test_without_its_callable_a_run_is_not_resumed(saved):
    run = saved({"reward.source": quick})
    with pytest.raises(UsageError) as caught:
        vlarl.train(resume=run)
    assert 'resume the run in Python, by vlarl.train(resume="my runs/mine", reward=quick)' in str(caught.value)


def test_the_status_and_a_configuration_that_can_not_be_read(saved):
    run = saved({"reward.source": quick})
    RunDirectory(run).write_status("failed", 1, 2)
    assert RunDirectory(run).read_status()["resume"] == 'vlarl.train(resume="my runs/mine", reward=quick)'
    (run / "config.yaml").write_bytes(b"python: \xff")
    assert resume_command(run) == "vlarl train --resume 'my runs/mine'"
    (run / "config.yaml").unlink()
    assert resume_command(run) == "vlarl train --resume 'my runs/mine'"


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_the_configuration_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    assert resume_command(tmp_path).startswith("vlarl train --resume ")
