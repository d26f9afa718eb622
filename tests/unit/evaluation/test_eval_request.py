from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlarl.config import load_config, to_yaml
from vlarl.config.problems import ConfigError
from vlarl.config.schema import EnvConfig, GymConfig, PolicyConfig
from vlarl.config.state_choice import missing_states
from vlarl.config.training_data import TrainedOn, TrainingData, by_training, run_of, write_training_data
from vlarl.envs.libero.suites import libero_spec
from vlarl.errors import UsageError
from vlarl.evaluation.request import eval_request, on_the_same_states, task_of
from vlarl.rollout.tasks import evaluation_tasks, tasks_from_states
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
    assert request.policy == PolicyConfig() and request.init_states == tuple(range(30, 50))
    assert eval_request("builtin:tiny-oft", {}, states_per_task=2).init_states == (30, 31)


def test_a_runs_checkpoint_is_measured_as_its_run_measures(checkpoint):
    overrides = {"env.suite": "tabletop_goal", "env.max_steps": 40, "env.task_ids": [1, 2], "env.num_envs": 7}
    request = eval_request(checkpoint({**overrides, "policy.decoder": "autoregressive"}), {})
    assert request.env == EnvConfig(suite="tabletop_goal", max_steps=40), (
        "not its tasks, nor its number of environments"
    )
    assert request.policy.decoder == "autoregressive" and request.init_states == tuple(range(30, 50))
    assert request.training is not None and request.training.states("tabletop_goal", None, 1) == set(range(30))
    assert request.training.states("tabletop_goal", None, 3) == set(), "a task that it left out"
    on_benchmark = eval_request(checkpoint({"env.protocol": "benchmark"}), {})
    assert on_benchmark.env.protocol == "benchmark" and on_benchmark.init_states == tuple(range(30, 50))


def test_what_is_given_goes_over_the_run(checkpoint):
    given = {"env.protocol": "benchmark", "env.task_ids": (3,), "policy.resize": "lanczos3"}
    request = eval_request(checkpoint(), given, states_per_task=5, temperature=0.5, seed=3, videos="failures")
    assert (request.env.protocol, request.env.task_ids, request.policy.resize) == ("benchmark", (3,), "lanczos3")
    assert (request.states_per_task, request.temperature, request.seed, request.videos) == (5, 0.5, 3, "failures")
    assert request.init_states == (30, 31, 32, 33, 34)


def test_another_suite_than_the_runs_is_foreign_to_it(checkpoint):
    request = eval_request(checkpoint({"env.max_steps": 20}), {"env.suite": "libero_goal"})
    assert request.env == EnvConfig(suite="libero_goal", protocol="benchmark")
    assert request.training is not None and request.training.states("libero_goal", None, 0) == set()


def test_a_gym_run_brings_its_environment(checkpoint):
    overrides = {"env.suite": "gym", "gym.env": "x-v0", "gym.instructions": ["go"], "gym.num_states": 10}
    overrides["policy.path"] = "builtin:tiny-oft"
    path = checkpoint({**overrides, "eval.states_per_task": 4})
    assert eval_request(path, {}, trust=True).gym.env == "x-v0"
    assert eval_request(path, {"env.suite": "tabletop_goal"}).gym == GymConfig()
    with pytest.raises(ConfigError, match="a task of gym has 4 initial states"):
        eval_request(path, {}, states_per_task=5, trust=True)


def test_a_supervised_run_has_a_policy_and_the_suite_that_was_demonstrated(checkpoint):
    path = checkpoint(text="policy:\n  path: init:tiny-oft\n  actions: l1\ndemos:\n  suites: [tabletop_goal]\n")
    request = eval_request(path, {})
    assert request.policy.actions == "l1" and request.env == EnvConfig(suite="tabletop_goal", protocol="benchmark")
    tasks = tuple(range(10))
    assert request.training == TrainingData(
        (TrainedOn(by="finetune", suite="tabletop_goal", task_ids=tasks, states=()),)
    )


def test_only_a_folder_in_a_runs_checkpoints_belongs_to_it(checkpoint, tmp_path, monkeypatch):
    path = Path(checkpoint())
    run = tmp_path / "runs" / "first"
    assert run_of(str(path)) == run
    assert run_of(str(path.with_name("missing"))) is None
    (run / "elsewhere" / "final").mkdir(parents=True)
    assert run_of(str(run / "elsewhere" / "final")) is None
    monkeypatch.chdir(run)
    assert run_of("openvla/openvla-7b") is None, "a hub id is not a folder of the run in the working directory"


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"env.suite": "tabletop_gol"}, {}, "--suite = 'tabletop_gol': unknown suite; did you mean 'tabletop_goal'?"),
        ({"env.task_ids": (4, 4)}, {}, "--tasks = [4, 4]: task 4 given more than once"),
        ({"env.task_ids": (10,)}, {}, "--tasks = [10]: no task 10; the suite has tasks 0 to 9"),
        ({"policy.actions": "l2"}, {}, "policy.actions = 'l2': must be one of tokens, hybrid, l1"),
        ({"env.suite": "gym"}, {}, "gym.env = null: name the environment"),
        ({"gym.env": "x-v0"}, {}, "gym.env = 'x-v0': has no effect without env.suite gym; set that"),
        ({"env.assets": "x"}, {}, "env.assets = 'x': has no effect without a suite of LIBERO; set that, or leave env"),
        (
            {"env.suite": "libero_spatial", "env.protocol": "disjoint"},
            {"states_per_task": 50},
            "--episodes = 50: a task of libero_spatial has 20 initial states for evaluation under protocol disjoint; "
            "use 20 or fewer, or use protocol benchmark, which has 50",
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


def test_as_many_states_as_there_are_may_be_requested():
    assert missing_states(20, "s", "disjoint", 20, 50) is None and missing_states(50, "s", "benchmark", 20, 50) is None
    assert missing_states(51, "s", "benchmark", 20, 50) == (
        "a task of s has 50 initial states for evaluation under protocol benchmark; use 50 or fewer"
    )


def test_an_episode_is_found_again_by_its_id():
    for task in (Task("tabletop_goal", 3, 31, 2**64 - 1), Task("a-b_c", 123, 4567, 255), Task("gym", 0, 0, 0)):
        assert task_of(task.episode_id) == task
    for wrong in ("", "suite-t0-s000-00000000000000ff", "suite-t00-s000-ff", "suite-t00-s000-00000000000000FF"):
        with pytest.raises(UsageError, match="is not an episode id: take one from episodes.jsonl"):
            task_of(wrong)


def test_a_replay_runs_in_the_episodes_own_suite(checkpoint):
    task = Task("tabletop_goal", 3, 31, 9)
    request = eval_request(checkpoint({"env.suite": "tabletop_object"}), {}, episode=task.episode_id)
    assert request.replay == task and request.env.suite == "tabletop_goal" and request.init_states == (31,)


LIBERO, DISJOINT, ALL = "libero_spatial", tuple(range(30)), tuple(range(50))


def by_train(states: tuple[int, ...] = DISJOINT, protocol: str = "disjoint", suite: str = LIBERO) -> TrainedOn:
    return TrainedOn(by="train", suite=suite, protocol=protocol, task_ids=tuple(range(10)), states=states)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[..., str]:
    """A checkpoint in no run's folder, with what it says that it was trained on; without runs, it says nothing."""

    def make(name: str, *runs: TrainedOn) -> str:
        folder = tmp_path / "elsewhere" / name
        folder.mkdir(parents=True)
        if runs:
            write_training_data(folder, TrainingData(runs))
        return str(folder)

    return make


def test_a_libero_checkpoint_that_left_its_run_is_measured_on_states_it_has_never_seen(elsewhere):
    request = eval_request(elsewhere("merged", by_train()), {})
    assert (request.env.suite, request.env.protocol) == (LIBERO, "disjoint"), "as its run measured it"
    assert request.init_states == tuple(range(30, 50))
    named = eval_request(elsewhere("copied", by_train()), {"env.suite": LIBERO}, states_per_task=5)
    assert named.init_states == (30, 31, 32, 33, 34)


def test_a_checkpoint_that_says_nothing_is_measured_on_the_last_states(elsewhere):
    unknown = elsewhere("unknown")
    request = eval_request(unknown, {"env.suite": LIBERO})
    assert request.training is None and request.env.protocol == "benchmark"
    assert request.init_states == tuple(range(30, 50))
    assert eval_request(unknown, {"env.suite": LIBERO}, states_per_task=25).init_states == tuple(range(25, 50))
    assert eval_request(unknown, {"env.suite": LIBERO}, states_per_task=50).init_states == ALL


def test_states_that_were_trained_on_have_to_be_requested(elsewhere):
    demonstrated = TrainedOn(by="finetune", suite=LIBERO, task_ids=tuple(range(10)), states=DISJOINT)
    path = elsewhere("finetuned", demonstrated)
    assert eval_request(path, {"env.suite": LIBERO}).init_states == tuple(range(30, 50))
    with pytest.raises(ConfigError) as error:
        eval_request(path, {"env.suite": LIBERO}, states_per_task=21)
    assert str(error.value) == (
        "--episodes = 21: training has used 30 of the 50 initial states that a task of libero_spatial has under "
        "protocol benchmark, in tasks 0 to 9; use 20 or fewer, or name the protocol (--protocol benchmark) to include states "
        "that were trained on"
    )
    requested = {"env.suite": LIBERO, "env.protocol": "benchmark"}
    assert eval_request(path, requested, states_per_task=50).init_states == ALL
    assert eval_request(path, requested).init_states == tuple(range(20)), "those of published results, as they are"
    assert eval_request(elsewhere("unknown"), requested, states_per_task=10).init_states == tuple(range(10))


def test_a_base_that_was_trained_on_the_held_out_states_leaves_none(elsewhere):
    path = elsewhere("twice", by_train(ALL, "benchmark"), by_train())
    with pytest.raises(
        ConfigError, match="--protocol: training has used 20 of the 20 initial states .* under protocol"
    ):
        eval_request(path, {})
    assert eval_request(path, {"env.protocol": "disjoint"}).init_states == tuple(range(30, 50))


def test_a_run_on_the_benchmarks_states_measures_itself_on_them(elsewhere):
    path = elsewhere("benchmark", by_train(ALL, "benchmark"))
    request = eval_request(path, {}, states_per_task=50)
    assert request.env.protocol == "benchmark" and request.init_states == ALL
    request = eval_request(path, {}, states_per_task=7)
    in_the_loop = evaluation_tasks(libero_spec(LIBERO, None), None, 7, 0, "benchmark")
    assert tasks_from_states(libero_spec(LIBERO, None), None, request.init_states, 0) == in_the_loop


@pytest.mark.parametrize(
    ("trained", "evaluated"), [("metaworld_mt10", "metaworld_mt50"), ("metaworld_mt25", "metaworld_ml25")]
)
def test_states_of_a_task_that_another_suite_shares_are_left_out(elsewhere, trained, evaluated):
    on_benchmark = by_training(EnvConfig(suite=trained, protocol="benchmark"), GymConfig())
    with pytest.raises(ConfigError, match="training has used 50 of the 50 initial states") as error:
        eval_request(elsewhere("all", on_benchmark), {"env.suite": evaluated})
    assert ("choose tasks that were not trained on with --tasks" in str(error.value)) == (evaluated == "metaworld_mt50")
    run = by_training(EnvConfig(suite=trained), GymConfig())
    first = run.model_copy(update={"states": tuple(range(25, 40))})
    assert eval_request(elsewhere("some", first), {"env.suite": evaluated}).init_states == (
        *range(15, 25),
        *range(40, 50),
    )


def test_only_the_evaluated_tasks_count(elsewhere):
    odd = TrainedOn(by="train", suite=LIBERO, protocol="disjoint", task_ids=(3,), states=tuple(range(30, 45)))
    path = elsewhere("odd", odd)
    assert eval_request(path, {}).init_states == tuple(range(45, 50))
    assert eval_request(path, {"env.task_ids": (0, 1)}).init_states == tuple(range(30, 50))
    with pytest.raises(
        ConfigError, match=r"15 of the 20 .* in task 3; use 5 .* with --tasks \(of libero_spatial: 0 to 2, 4 to 9\)"
    ):
        eval_request(path, {}, states_per_task=6)


def test_two_checkpoints_are_compared_on_states_that_neither_has_seen(elsewhere):
    a = elsewhere("a", by_train((*DISJOINT, 48, 49)))
    b = elsewhere("b", by_train(tuple(range(25, 40))))
    shared = {"env.suite": LIBERO, "env.protocol": "disjoint"}  # what A chose is given for B
    first, second = on_the_same_states(eval_request(a, {}), eval_request(b, shared))
    assert first.init_states == second.init_states == tuple(range(40, 48))
    assert (first.checkpoint, second.checkpoint) == (a, b)
    exam = elsewhere("exam", by_train(ALL, "benchmark"))
    with pytest.raises(ConfigError, match=rf"training of {a} and of {exam} has used 20 of the 20 initial states"):
        on_the_same_states(eval_request(a, {}), eval_request(exam, shared))
    requested = {"env.suite": LIBERO, "env.protocol": "benchmark"}
    first, second = on_the_same_states(eval_request(a, requested, states_per_task=50), eval_request(exam, requested))
    assert first.init_states == second.init_states == ALL


def test_what_an_environment_is_called_is_compared_and_never_imported(elsewhere, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = TrainedOn(
        by="train", suite="gym", gym_env="trap:make", protocol="disjoint", task_ids=(0,), states=tuple(range(35))
    )
    path = elsewhere("gym", run)
    with pytest.raises(ConfigError, match="gym.env = null: name the environment"):
        eval_request(path, {})
    own = {"gym.env": "trap:make", "gym.instructions": ("go",)}
    assert eval_request(path, own).init_states == tuple(range(35, 50))
    assert eval_request(path, own | {"gym.env": "other-v0"}).init_states == tuple(range(30, 50))
