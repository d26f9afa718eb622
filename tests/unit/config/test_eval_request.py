from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlarl.config import load_config, to_yaml
from vlarl.config.eval_request import eval_request, missing_states, run_of, task_of
from vlarl.config.problems import ConfigError
from vlarl.config.schema import EnvConfig, GymConfig, PolicyConfig
from vlarl.errors import UsageError
from vlarl.types import Task


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """The checkpoint of a run with this configuration."""

    def make(overrides: dict[str, Any] | None = None, text: str | None = None) -> str:
        folder = tmp_path / "runs" / "first" / "checkpoints" / "final"
        folder.mkdir(parents=True, exist_ok=True)
        content = to_yaml(load_config(overrides=overrides or {})) if text is None else text
        (tmp_path / "runs" / "first" / "config.yaml").write_text(content)
        return str(folder)

    return make


def test_a_foreign_checkpoint_is_measured_on_the_benchmark():
    request = eval_request("builtin:tiny-oft", {})
    assert request.env == EnvConfig(protocol="benchmark") and request.gym == GymConfig()
    assert request.policy == PolicyConfig() and request.trained_protocol is None


def test_a_runs_checkpoint_is_measured_as_its_run_measures(checkpoint):
    overrides = {"env.suite": "tabletop_goal", "env.max_steps": 40, "env.task_ids": [1, 2], "env.num_envs": 7}
    request = eval_request(checkpoint({**overrides, "policy.decoder": "autoregressive"}), {})
    assert request.env == EnvConfig(suite="tabletop_goal", max_steps=40), (
        "not its tasks, nor its number of environments"
    )
    assert request.policy.decoder == "autoregressive" and request.trained_protocol == "disjoint"
    assert eval_request(checkpoint({"env.protocol": "benchmark"}), {}).env.protocol == "benchmark"


def test_what_is_given_goes_over_the_run(checkpoint):
    given = {"env.protocol": "benchmark", "env.task_ids": (3,), "policy.resize": "lanczos3"}
    request = eval_request(checkpoint(), given, states_per_task=5, temperature=0.5, seed=3, videos="failures")
    assert (request.env.protocol, request.env.task_ids, request.policy.resize) == ("benchmark", (3,), "lanczos3")
    assert (request.states_per_task, request.temperature, request.seed, request.videos) == (5, 0.5, 3, "failures")
    assert request.trained_protocol == "disjoint"


def test_another_suite_than_the_runs_is_foreign_to_it(checkpoint):
    request = eval_request(checkpoint({"env.max_steps": 20}), {"env.suite": "libero_goal"})
    assert request.env == EnvConfig(suite="libero_goal", protocol="benchmark")
    assert request.trained_protocol is None


def test_a_gym_run_brings_its_environment(checkpoint):
    overrides = {"env.suite": "gym", "gym.env": "x-v0", "gym.instructions": ["go"], "gym.num_states": 10}
    path = checkpoint({**overrides, "eval.states_per_task": 4})
    assert eval_request(path, {}).gym.env == "x-v0"
    assert eval_request(path, {"env.suite": "tabletop_goal"}).gym == GymConfig()
    with pytest.raises(ConfigError, match="a task of gym has 4 initial states"):
        eval_request(path, {}, states_per_task=5)


def test_a_supervised_run_has_a_policy_and_no_suite(checkpoint):
    path = checkpoint(text="policy:\n  path: init:tiny-oft\n  actions: l1\ndemos:\n  suites: [tabletop_goal]\n")
    request = eval_request(path, {})
    assert request.policy.actions == "l1" and request.env == EnvConfig(protocol="benchmark")
    assert request.trained_protocol is None


def test_only_a_folder_in_a_runs_checkpoints_belongs_to_it(checkpoint, tmp_path, monkeypatch):
    path = Path(checkpoint())
    run = tmp_path / "runs" / "first"
    assert run_of(str(path)) == run
    assert run_of(str(path.with_name("missing"))) is None
    (run / "elsewhere" / "final").mkdir(parents=True)
    assert run_of(str(run / "elsewhere" / "final")) is None
    monkeypatch.chdir(run)
    assert run_of("openvla/openvla-7b") is None, "a hub id is no folder of the run one stands in"


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"env.suite": "tabletop_gol"}, {}, "--suite = 'tabletop_gol': unknown suite; did you mean 'tabletop_goal'?"),
        ({"env.task_ids": (4, 4)}, {}, "--tasks = [4, 4]: task 4 given more than once"),
        ({"env.task_ids": (10,)}, {}, "--tasks = [10]: no task 10; the suite has tasks 0 to 9"),
        ({"policy.actions": "l2"}, {}, "policy.actions = 'l2': must be one of tokens, hybrid, l1"),
        ({"env.suite": "gym"}, {}, "gym.env = null: name the environment"),
        ({"gym.env": "x-v0"}, {}, "gym.env = 'x-v0': only read with env.suite gym"),
        (
            {"env.suite": "libero_spatial", "env.protocol": "disjoint"},
            {"states_per_task": 50},
            "--episodes = 50: a task of libero_spatial has 20 initial states for evaluation under protocol disjoint; "
            "ask for 20 or fewer, or take protocol benchmark, which has 50",
        ),
    ],
)
def test_what_can_be_refused_is_refused_at_once(given, settings, message):
    with pytest.raises(ConfigError) as error:
        eval_request("builtin:tiny-oft", given, **settings)
    assert message in str(error.value)


def test_an_option_that_a_run_has_and_this_version_lacks_is_named(checkpoint):
    with pytest.raises(ConfigError, match=r"env.old = true: no option of this version of vlarl"):
        eval_request(checkpoint(text="env:\n  old: true\n"), {})


def test_as_many_states_as_there_are_may_be_asked_for():
    assert missing_states(20, "s", "disjoint", 20, 50) is None and missing_states(50, "s", "benchmark", 20, 50) is None
    assert missing_states(51, "s", "benchmark", 20, 50) == (
        "a task of s has 50 initial states for evaluation under protocol benchmark; ask for 50 or fewer"
    )


def test_an_episode_is_found_again_by_its_id():
    for task in (Task("tabletop_goal", 3, 31, 2**64 - 1), Task("a-b_c", 123, 4567, 255), Task("gym", 0, 0, 0)):
        assert task_of(task.episode_id) == task
    for wrong in ("", "suite-t0-s000-00000000000000ff", "suite-t00-s000-ff", "suite-t00-s000-00000000000000FF"):
        with pytest.raises(UsageError, match="is no episode's id: take one from episodes.jsonl"):
            task_of(wrong)


def test_a_replay_runs_in_the_episodes_own_suite(checkpoint):
    task = Task("tabletop_goal", 3, 31, 9)
    request = eval_request(checkpoint({"env.suite": "tabletop_object"}), {}, episode=task.episode_id)
    assert request.replay == task and request.env.suite == "tabletop_goal" and request.trained_protocol is None
