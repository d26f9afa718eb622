"""What a policy was trained on goes with it: through load and save, adapters, merges and the hub."""

import shutil
from pathlib import Path

import pytest
import torch
from fakes.hub import FakeHub, Repo

from vlarl.cli import main
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.schema import Config, EnvConfig, GymConfig, LoraConfig, ModelConfig
from vlarl.config.state_choice import state_warnings
from vlarl.config.training_data import FILE_NAME, TrainedOn, TrainingData, by_training, read_training_data
from vlarl.config.training_data import write_training_data as write
from vlarl.data.finetune import start
from vlarl.evaluation.request import eval_request
from vlarl.export.merge import merge, merge_final
from vlarl.policies.load import load_policy
from vlarl.policies.locate import hub_training_data
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.prepare import load_trained_policy

CPU = torch.device("cpu")
BASE = TrainedOn(by="finetune", suite="libero_goal", task_ids=(0,), states=(0, 1))
ADAPTER = TrainedOn(by="train", suite="libero_spatial", protocol="disjoint", task_ids=(0,), states=(4,))
OWN = by_training(EnvConfig(suite="tabletop_goal", task_ids=(3,)), GymConfig())


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that was trained on something."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    write(folder, TrainingData((BASE,), ("some/hub-id",)))
    return folder


def configured(base: Path, **sections: dict[str, object]) -> Config:
    env = {"suite": "tabletop_goal", "task_ids": (3,)}
    return Config.model_validate({"env": env, "policy": {"path": str(base)}, **sections})


def test_a_fresh_policy_says_that_it_was_trained_on_nothing(checkpoint):
    assert read_training_data(checkpoint) == TrainingData()


def test_loading_and_saving_keeps_it(base, tmp_path):
    load_policy(base).save(tmp_path / "again")
    assert read_training_data(tmp_path / "again") == TrainingData((BASE,), ("some/hub-id",))


def test_a_checkpoint_that_does_not_say_is_named_in_those_that_come_from_it(base, tmp_path):
    (base / FILE_NAME).unlink()
    load_policy(base).save(tmp_path / "again")
    assert read_training_data(tmp_path / "again") == TrainingData((), (str(base),))
    assert load_policy("init:tiny-oft").training_data == TrainingData(), "made from nothing"


def test_a_run_adds_its_own_states_and_every_save_of_it_has_them(base, tmp_path):
    policy = load_trained_policy(configured(base), None, CPU)
    expected = TrainingData((BASE, OWN), ("some/hub-id",))
    assert policy.training_data == expected
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    for dtype in (None, torch.bfloat16):
        assert read_training_data(store.save_policy("best_return", policy, {}, dtype)) == expected
    resumed = load_trained_policy(configured(base), tmp_path / "checkpoints" / "best_return", CPU)
    assert resumed.training_data == expected, "a resumed run is one run"


def test_an_adapter_and_its_merge_say_what_both_were_trained_on(base, tmp_path):
    policy = load_trained_policy(configured(base, lora={"enabled": True, "rank": 2}), None, CPU)
    policy.save(tmp_path / "adapter")
    expected = TrainingData((BASE, OWN), ("some/hub-id",))
    assert read_training_data(tmp_path / "adapter") == expected
    assert load_policy(tmp_path / "adapter").training_data == expected
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert read_training_data(tmp_path / "merged") == expected
    (tmp_path / "adapter" / FILE_NAME).unlink()
    unknown = ("some/hub-id", str(tmp_path / "adapter"))
    assert load_policy(tmp_path / "adapter").training_data == TrainingData((BASE,), unknown)


def test_a_run_that_continues_an_adapter_adds_to_what_that_was_trained_on(base, tmp_path):
    policy = load_policy(base)
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=2), seed=0)
    policy.save(tmp_path / "adapter")
    write(tmp_path / "adapter", TrainingData((ADAPTER,)))
    continued = load_trained_policy(configured(base, lora={"adapter": str(tmp_path / "adapter")}), None, CPU)
    assert continued.training_data == TrainingData((BASE, ADAPTER, OWN), ("some/hub-id",))


def test_supervised_runs_say_which_states_were_demonstrated(base):
    demos = {"suites": ("tabletop_goal",), "task_ids": (2,), "num_workers": 1}
    config = FinetuneConfig.model_validate({"policy": {"path": str(base)}, "demos": demos})
    policy, _ = start(config, CPU)
    fresh = TrainedOn(by="finetune", suite="tabletop_goal", task_ids=(2,), states=())
    assert policy.training_data == TrainingData((BASE, fresh), ("some/hub-id",))
    golden = Path(__file__).parents[2] / "golden" / "rlds"
    recorded = FinetuneConfig.model_validate({"policy": {"path": "init:tiny-oft"}, "demos": {"path": str(golden)}})
    policy, _ = start(recorded, CPU)
    assert policy.training_data == TrainingData((TrainedOn(by="finetune", suite="libero_spatial"),))


@pytest.fixture
def published(hub: FakeHub, base: Path) -> FakeHub:
    hub.repos["open/vla"] = Repo({"main": {path.name: path.read_bytes() for path in base.iterdir()}})
    return hub


def test_the_hub_is_queried_before_the_weights_are_downloaded(published, tmp_path, monkeypatch, capsys):
    data = hub_training_data("open/vla")
    assert data == TrainingData((BASE,), ("some/hub-id",)) and data.read_from == "open/vla/training_data.json"
    assert not [request for request in published.requests if "safetensors" in request]
    monkeypatch.chdir(tmp_path)
    assert hub_training_data(str(tmp_path / "base")) is None and hub_training_data("builtin:tiny-oft") is None
    flags = ["--suite", "tabletop_goal", "--tasks", "3", "--episodes", "1", "--device", "cpu", "--out", "x"]
    assert main(["eval", "open/vla", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "initial state: index 30 of task 3; whether it was trained on is not known"
    assert lines[-2].startswith("warning: this checkpoint comes from some/hub-id, and it is not known")
    del published.repos["open/vla"].revisions["main"][FILE_NAME]
    assert hub_training_data("open/vla") is None


@pytest.fixture
def libero_run(base: Path, tmp_path: Path) -> Path:
    """The folder of a run on LIBERO with adapters, whose final checkpoint is merged at its end."""
    write(base, TrainingData())
    env = {"suite": "libero_object", "protocol": "disjoint"}
    config = Config.model_validate({"env": env, "policy": {"path": str(base)}, "lora": {"enabled": True, "rank": 2}})
    policy = load_trained_policy(config, None, CPU)
    run = tmp_path / "run"
    policy.save(run / "checkpoints" / "final")
    merge_final(run / "checkpoints")
    return run


def leave(run: Path, how: str, out: Path) -> Path:
    """A checkpoint of the run, outside of its folder."""
    if how == "copied adapter":
        return Path(shutil.copytree(run / "checkpoints" / "final", out))
    if how == "copied checkpoint.merge":
        return Path(shutil.copytree(run / "checkpoints" / "merged", out))
    assert main(["merge", str(run / "checkpoints" / "final"), str(out)]) == 0
    return Path(shutil.copytree(out, out.with_name("copied"))) if how == "copied vlarl merge" else out


@pytest.mark.parametrize("how", ["copied adapter", "copied checkpoint.merge", "vlarl merge", "copied vlarl merge"])
def test_a_checkpoint_that_left_its_run_is_evaluated_as_the_run_was(libero_run, tmp_path, how):
    outside = leave(libero_run, how, tmp_path / "outside")
    shutil.rmtree(libero_run)
    request = eval_request(outside, {})
    assert (request.env.suite, request.env.protocol) == ("libero_object", "disjoint")
    assert request.init_states == tuple(range(30, 50))
    episodes = [(task, state) for task in range(10) for state in range(50)]
    (warning,) = state_warnings(request.training, "libero_object", None, episodes)
    assert warning.startswith("300 of 500 episodes begin from initial states that this checkpoint was trained on")
    (outside / FILE_NAME).unlink()
    unknown = eval_request(outside, {"env.suite": "libero_object"}).training
    assert "may be too high" in state_warnings(unknown, "libero_object", None, episodes)[0]


def test_a_push_contains_it(libero_run, capsys):
    assert main(["push", str(libero_run / "checkpoints" / "merged"), "me/policy", "--dry-run"]) == 0
    assert FILE_NAME in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suites", "expected"),
    [(("libero_goal",), "libero_goal"), (("libero_goal", "libero_object"), "tabletop_spatial")],
)
def test_a_base_that_left_its_run_is_evaluated_on_the_suite_that_was_demonstrated(base, suites, expected):
    write(base, TrainingData(tuple(TrainedOn(by="finetune", suite=suite, states=(0, 1)) for suite in suites)))
    assert eval_request(base, {}).env.suite == expected
