"""How long a run trains: in iterations or in environment steps, and what follows from it."""

import pytest

from vlarl.cli import main
from vlarl.config import Config, ConfigError, derive, load_config
from vlarl.config.derive import length_lines, total_iterations, updates_in

STEPS = 32 * 4 * 32  # of an iteration of tabletop_grpo whose episodes last to the time limit


def length(*layers: str, file: str | None = None) -> tuple[int | None, int | None]:
    run = load_config(file, list(layers)).run
    return run.iterations, run.total_env_steps


def test_the_length_that_is_given_last_counts(tmp_path):
    assert length() == (14, None)
    assert length("--timesteps", "10000") == (None, 10_000)
    assert length("--total_timesteps=10000", "--run.iterations=3") == (3, 10_000)
    path = tmp_path / "mine.yaml"
    path.write_text("run:\n  total_env_steps: 500\n")
    assert length(file=path) == (None, 500)
    assert length("--run.iterations", "9", file=path) == (9, None)
    assert length("--run.seed", "9", file=path) == (None, 500)
    path.write_text("run:\n  total_env_steps: 500\n  iterations: 7\n")
    assert length(file=path) == (7, 500)


def test_a_saved_configuration_keeps_its_length(tmp_path, capsys):
    assert main(["train", "--timesteps", "9000", "--dry-run"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config(overrides=["--timesteps", "9000"])


def test_a_run_has_a_length():
    with pytest.raises(
        ConfigError, match=r"run.iterations = null: there is no length of training; set run.iterations, or run\."
    ):
        load_config(overrides={"run.iterations": None})


def test_the_totals_follow_from_the_steps():
    config = load_config(overrides=["--timesteps", str(10 * STEPS)])
    derived = derive(config)
    assert (derived.total_iterations, derived.total_env_steps_max) == (10, 10 * STEPS)
    assert (derived.total_updates, derived.total_optimizer_steps, derived.total_episodes) == (10, 40, 1280)
    assert derived.num_evaluations == 3  # before, after 7, at the end
    (note,) = length_lines(config)
    assert f"reaches run.total_env_steps = {10 * STEPS}" in note and "last to the time limit" in note
    assert length_lines(load_config()) == []


def test_without_a_time_limit_nothing_is_made_up():
    gym = {"env.suite": "gym", "gym.env": "X-v0", "gym.instructions": ["go"], "policy.path": "init:tiny-oft"}
    config = load_config(overrides=gym | {"run.total_env_steps": 1000})
    assert (derive(config).total_iterations, derive(config).total_episodes) == (None, None)
    assert "is not known, as env.max_steps is not set" in length_lines(config)[0]
    assert total_iterations(config, done=2, env_steps=100) == 20


@pytest.mark.parametrize(
    ("done", "env_steps", "expected"),
    [
        (0, 0, 3),  # as if every episode lasted to its time limit
        (1, 2048, 6),  # episodes end sooner: twice as many
        (2, 2 * 4096, 3),
        (3, 3 * 4096, 3),  # reached
        (5, 12_200, 6),  # one more, however little is missing
        (6, 14_000, 6),
    ],
)
def test_the_number_of_iterations_is_estimated_during_the_run(done, env_steps, expected):
    config = load_config(overrides=["--timesteps", str(3 * STEPS)])
    assert total_iterations(config, done, env_steps) == expected


def test_both_lengths_are_limits():
    config = load_config(overrides=["--timesteps", str(30 * STEPS), "--run.iterations", "4"])
    assert total_iterations(config) == 4 and updates_in(4, config) == 4
    assert total_iterations(config, done=2, env_steps=100) == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--optim.warmup_iterations", "4"], "optim.warmup_iterations = 4 with run.total_env_steps = 12288, which 3"),
        (["--optim.rollouts_per_update", "4"], "set it to 3 or less, or raise run.total_env_steps"),
        (
            ["--algorithm.name", "ppo", "--value-init-steps", "3"],
            "never be trained; set it below 3, or raise run.total",
        ),
    ],
)
def test_what_does_not_fit_into_the_steps_is_refused(overrides, said):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["--timesteps", str(3 * STEPS), *overrides])
    assert said in str(caught.value)


def test_the_default_is_a_number_of_iterations():
    assert (Config().run.iterations, Config().run.total_env_steps) == (20, None)
