"""training_data.json: what a checkpoint was trained on, wherever it lies."""

import json
import shutil
from pathlib import Path

import pytest

from vlarl.config import load_config, to_yaml
from vlarl.config.finetune import DemoConfig
from vlarl.config.known import SUITES, is_prompts
from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.config.suites import SuiteStates, suite_facts
from vlarl.config.training_data import (
    FILE_NAME,
    TrainedOn,
    TrainingData,
    by_demonstrations,
    by_training,
    read_training_data,
    training_data_of,
    write_training_data,
)
from vlarl.data.demos import demonstration_tasks
from vlarl.envs.base import SuiteSpec
from vlarl.envs.build import NO_DATA, build_prompts
from vlarl.envs.libero.suites import libero_spec, task_names
from vlarl.envs.metaworld.suites import metaworld_spec
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError
from vlarl.rollout.tasks import evaluation_states, training_states

TEN = tuple(range(10))
SPATIAL = TrainedOn(by="train", suite="libero_spatial", protocol="disjoint", task_ids=(0, 3), states=(0, 1, 2))
DEMOS = TrainedOn(by="finetune", suite="libero_goal", task_ids=TEN, states=(0, 1))


def spec_of(suite: str) -> SuiteSpec:
    if suite in TABLETOP_SUITES:
        return TABLETOP_SUITES[suite].spec
    if is_prompts(suite):
        return build_prompts(suite, NO_DATA).spec
    return libero_spec(suite, None) if suite.startswith("libero_") else metaworld_spec(suite)


@pytest.mark.parametrize("suite", SUITES)
def test_the_states_of_a_suite_are_known_without_its_simulator(suite):
    spec, states = spec_of(suite), SuiteStates.of(SUITES[suite])
    for protocol in ("disjoint", "benchmark"):
        assert states.trained(protocol) == training_states(spec, protocol)
        assert states.evaluated(protocol) == evaluation_states(spec, protocol)
    if is_prompts(suite):  # which has no demonstrations
        return
    demonstrated = {task.init_state for task in demonstration_tasks(spec, (0,), 45, seed=0)}
    (run,) = by_demonstrations(DemoConfig(suites=(suite,), episodes_per_task=45)).runs
    if suite not in TABLETOP_SUITES:  # whose demonstrations tabletop_demos.py makes, from fresh states alone
        assert demonstrated.intersection(range(50)) == set(run.states)
    assert SUITES[suite].demos_from_fresh_states == (run.states == ())


def test_the_states_of_a_gymnasium_environment():
    gym = GymConfig(env="x-v0", num_states=7, instructions=("a", "b"))
    facts = suite_facts(EnvConfig(suite="gym"), gym)
    assert SuiteStates.of(facts) == SuiteStates((0, 1, 2, 3), (4, 5, 6), (4, 5, 6))
    assert by_training(EnvConfig(suite="gym"), gym) == TrainedOn(
        by="train", suite="gym", gym_env="x-v0", protocol="disjoint", task_ids=(0, 1), states=(0, 1, 2, 3)
    )


def test_what_runs_train_on():
    env = EnvConfig(suite="libero_goal", task_ids=(4, 2))
    assert by_training(env, GymConfig()) == TrainedOn(
        by="train", suite="libero_goal", protocol="disjoint", task_ids=(4, 2), states=tuple(range(30))
    )
    benchmark = by_training(EnvConfig(suite="libero_90", protocol="benchmark"), GymConfig())
    assert (benchmark.task_ids, benchmark.states) == (tuple(range(90)), tuple(range(50)))
    few = DemoConfig(suites=("libero_10", "tabletop_goal"), episodes_per_task=4, task_ids=(1,))
    assert by_demonstrations(few) == TrainingData(
        (
            TrainedOn(by="finetune", suite="libero_10", task_ids=(1,), states=(0, 1, 2, 3)),
            TrainedOn(by="finetune", suite="tabletop_goal", task_ids=(1,), states=()),
        )
    )
    assert by_demonstrations(few, "libero_spatial").runs == (TrainedOn(by="finetune", suite="libero_spatial"),)
    (recorded,) = by_demonstrations(few, "tabletop_goal").runs
    assert recorded.states == tuple(range(30)), "vlarl data record takes the training states"


@pytest.mark.parametrize("dataset", ["libero_4_task_suites", "my_libero_goal", "gym"])
def test_a_recorded_dataset_of_an_unknown_name_may_be_of_any_suite(dataset):
    assert by_demonstrations(DemoConfig(), dataset) == TrainingData(unknown=(dataset,))


@pytest.mark.parametrize(
    ("trained", "evaluated"),
    [
        ("metaworld_mt10", "metaworld_mt50"),
        ("metaworld_mt50", "metaworld_mt10"),
        ("metaworld_mt25", "metaworld_ml25"),
        ("metaworld_ml10", "metaworld_ml45"),
        ("metaworld_mt25", "metaworld_ml25_test"),  # basketball
        ("metaworld_mt10", "metaworld_ml45_test"),  # nothing in common
    ],
)
def test_suites_of_meta_world_share_tasks_and_their_states(trained, evaluated):
    instructions = {task.instruction for task in metaworld_spec(trained).tasks}
    for run in (
        by_training(EnvConfig(suite=trained), GymConfig()),
        TrainedOn(by="train", suite=trained, protocol="disjoint", states=tuple(range(30))),
    ):
        data = TrainingData((run,))
        for task in metaworld_spec(evaluated).tasks:
            seen = set(range(30)) if task.instruction in instructions else set()
            assert data.states(evaluated, None, task.task_id) == seen, task
            assert data.on(evaluated, None, task.task_id) == ((run,) if seen else ())


def test_one_task_of_meta_world_is_found_in_other_suites():
    run = TrainedOn(by="finetune", suite="metaworld_mt10", task_ids=(0, 77), states=(4,))
    data = TrainingData((run,))
    (task_id,) = (task for task in range(50) if data.states("metaworld_mt50", None, task))
    assert metaworld_spec("metaworld_mt50").tasks[task_id].instruction == "reach the red marker"
    assert data.states("libero_spatial", None, 0) == data.states("metaworld_mt50", None, 50) == set()


def test_suites_of_libero_share_no_task():
    tasks = [name for suite in SUITES if suite.startswith("libero_") for name in task_names(suite)]
    assert len(tasks) == len(set(tasks)) == 130


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 4097, "\udc80"])
def test_what_the_file_could_not_give_back_is_refused_before_it_is_written(tmp_path, name):
    with pytest.raises(UsageError, match=r"unknown\.1.*rename"):
        write_training_data(tmp_path, TrainingData().plus((), ["fine", name]))
    assert list(tmp_path.iterdir()) == []


def test_the_file_holds_what_was_written_a_line_for_each_run(tmp_path):
    data = TrainingData((DEMOS, SPATIAL), unknown=("openvla/openvla-7b",))
    write_training_data(tmp_path, data)
    text = (tmp_path / FILE_NAME).read_text()
    assert json.loads(text) == {
        "format": 1,
        "trained_on": [
            {"by": "finetune", "suite": "libero_goal", "task_ids": list(TEN), "states": [0, 1]},
            {
                "by": "train",
                "suite": "libero_spatial",
                "protocol": "disjoint",
                "task_ids": [0, 3],
                "states": [0, 1, 2],
            },
        ],
        "unknown": ["openvla/openvla-7b"],
    }
    assert len(text.splitlines()) == 8
    assert read_training_data(tmp_path) == data
    for fresh in (TrainingData(), TrainingData((TrainedOn(by="finetune", suite="mine"),))):
        write_training_data(tmp_path, fresh)
        assert read_training_data(tmp_path) == fresh
    assert read_training_data(tmp_path.parent) is None


def test_a_run_adds_to_what_its_base_was_trained_on():
    both = TrainingData((DEMOS,), ("a",)).joined(TrainingData((SPATIAL,), ("b", "a")))
    assert (both.runs, both.unknown) == ((DEMOS, SPATIAL), ("a", "b"))
    assert both.plus([SPATIAL]) == both, "a run that is resumed is named once"
    assert both.plus([DEMOS]).runs == (SPATIAL, DEMOS), "the newest is the last"
    more = SPATIAL.model_copy(update={"states": (7,), "task_ids": (3,), "protocol": "benchmark"})
    whole = both.plus([more])
    assert whole.states("libero_spatial", None, 3) == {0, 1, 2, 7}
    assert whole.states("libero_spatial", None, 0) == {0, 1, 2} and whole.states("libero_spatial", None, 1) == set()
    assert whole.states("libero_object", None, 0) == set()
    assert (whole.suite, whole.protocol("libero_spatial"), whole.protocol("libero_goal")) == (
        "libero_spatial", "benchmark", None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("not json", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"format": 2, "trained_on": [], "unknown": []}', "format"),
        ('{"format": true, "trained_on": [], "unknown": []}', "format: Input should be a valid integer"),
        ('{"format": 1.0, "trained_on": [], "unknown": []}', "format: Input should be a valid integer"),
        ('{"format": 1, "unknown": []}', "trained_on: Field required"),
        ('{"format": 1, "trained_on": [], "unknown": [], "code": "os.system"}', "code: Extra inputs are not permitted"),
        ('{"format": 1, "trained_on": [{"by": "train", "suite": 3}], "unknown": []}', "trained_on.0.suite"),
        (
            '{"format": 1, "trained_on": [{"by": "train", "suite": "s", "states": [-1]}], "unknown": []}',
            "trained_on.0.states.0: Input should be greater than or equal to 0",
        ),
        (
            '{"format": 1, "trained_on": [{"by": "train", "suite": "s", "states": ["1"]}], "unknown": []}',
            "trained_on.0.states.0",
        ),
        ('{"format": 1, "trained_on": [], "unknown": ["\\u001b[2J"]}', "unknown.0: String should match pattern"),
        ('{"format": 1, "trained_on": [{"by": "magic", "suite": "s"}], "unknown": []}', "trained_on.0.by"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, content, reason):
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(UsageError) as error:
        training_data_of(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / FILE_NAME} does not say what the checkpoint was trained on (")
    assert reason in str(error.value) and "move it away" in str(error.value)


def make_run(root: Path, name: str, **overrides: object) -> Path:
    """The final checkpoint of a run from before there was such a file."""
    final = root / name / "checkpoints" / "final"
    final.mkdir(parents=True)
    options = {key.replace("__", "."): value for key, value in overrides.items()}
    (root / name / "config.yaml").write_text(to_yaml(load_config(overrides=options)))
    return final


def test_a_run_from_before_the_file_is_known_by_its_configuration(tmp_path):
    first = make_run(tmp_path, "first", env__suite="tabletop_goal", env__task_ids=[1])
    trained = TrainedOn(by="train", suite="tabletop_goal", protocol="disjoint", task_ids=(1,), states=tuple(range(30)))
    data = training_data_of(first)
    assert data.runs[-1] == trained and data.unknown == () and data.read_from.endswith("first/config.yaml")
    assert [run.by for run in data.runs[:-1]] == ["finetune"] * 4, "what the built-in base was trained on"
    second = make_run(tmp_path, "second", policy__path=str(first), env__protocol="benchmark")
    assert training_data_of(second).runs[-2:] == (
        trained,
        TrainedOn(
            by="train", suite="tabletop_spatial", protocol="benchmark", task_ids=TEN, states=tuple(range(30, 50))
        ),
    )
    foreign = make_run(tmp_path, "foreign", policy__path="openvla/openvla-7b")
    assert training_data_of(foreign).unknown == ("openvla/openvla-7b",)
    shutil.copytree(first, tmp_path / "copy")
    assert training_data_of(tmp_path / "copy") is None
    assert training_data_of("openvla/openvla-7b") is None
    assert training_data_of("init:tiny-oft") == TrainingData()


def test_runs_that_name_each_other_come_to_an_end(tmp_path):
    first = make_run(tmp_path, "first")
    second = make_run(tmp_path, "second", policy__path=str(first))
    (tmp_path / "first" / "config.yaml").write_text(to_yaml(load_config(overrides={"policy.path": str(second)})))
    assert len(training_data_of(first).runs) == 1


def test_the_file_and_the_run_are_both_believed(tmp_path):
    final = make_run(tmp_path, "run", env__suite="libero_goal", policy__path="openvla/openvla-7b")
    write_training_data(final, TrainingData((SPATIAL,)))
    data = training_data_of(final)
    assert data.runs == (SPATIAL, by_training(EnvConfig(suite="libero_goal"), GymConfig()))
    assert data.unknown == () and data.read_from == f"{final}/{FILE_NAME}"


def test_a_dataset_is_not_forgotten_by_a_run_from_before_the_file(tmp_path):
    final = tmp_path / "tuned" / "checkpoints" / "final"
    final.mkdir(parents=True)
    config = "policy:\n  path: builtin:tiny-oft\ndemos:\n  path: /data/libero_goal\n"
    (tmp_path / "tuned" / "config.yaml").write_text(config)
    data = training_data_of(final)
    assert len(data.runs) == 4 and data.unknown == ("/data/libero_goal",), "its base is known, the dataset is not"
    write_training_data(final, TrainingData((DEMOS,)))
    assert training_data_of(final) == TrainingData((DEMOS,)), "the file knows the dataset"


@pytest.mark.parametrize("name", ["builtin:tiny-oft", "builtin:tiny-openvla"])
def test_the_built_in_checkpoints_have_seen_fresh_states_alone(name):
    data = training_data_of(name)
    assert {run.suite for run in data.runs} == set(TABLETOP_SUITES)
    assert {run.states for run in data.runs} == {()} and data.unknown == () and data.suite is None
    assert data.read_from == f"{name}/{FILE_NAME}"
