"""What a SmolVLA folder says about its use: statistics that were set, gripper, state and views, pipelines."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.smolvla import FOLDER, seen, smolvla
from safetensors.torch import load_file, save_file

from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig
from vlarl.data.statistics import dataset_statistics
from vlarl.decisions import Sampling
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.errors import UsageError
from vlarl.policies.family import FlowOptions
from vlarl.policies.load import describe_checkpoint, load_policy
from vlarl.policies.smolvla.conventions import FILE_NAME, signed_statistics, to_signed
from vlarl.policies.smolvla.pipelines import NORMALIZING
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.types import FloatArray, Task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "policy"
    shutil.copytree(FOLDER, copied, ignore=shutil.ignore_patterns("*.npz"))
    return copied


def values(seed: int = 1) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(50, 7)).astype(np.float32), rng.normal(size=(50, 8)).astype(np.float32)


def without_state_files(folder: Path) -> None:
    """As lerobot writes pipelines where there are no statistics."""
    for name in NORMALIZING:
        content = json.loads((folder / name).read_text())
        for step in content["steps"]:
            step.pop("state_file", None)
        (folder / name).write_text(json.dumps(content))
    for path in folder.glob("policy_*.safetensors"):
        path.unlink()


def without_pipelines(folder: Path) -> None:
    for path in folder.glob("policy_*"):
        path.unlink()


def without_the_step(folder: Path) -> None:
    without_state_files(folder)
    for name, normalizing in NORMALIZING.items():
        content = json.loads((folder / name).read_text())
        content["steps"] = [step for step in content["steps"] if step["registry_name"] != normalizing]
        (folder / name).write_text(json.dumps(content))


def with_empty_files(folder: Path) -> None:
    for path in folder.glob("policy_*.safetensors"):
        save_file({}, path)


def among_the_weights(folder: Path) -> None:
    """As older folders have them; here for states of another robot, which can't be used."""
    without_pipelines(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["normalize_inputs.buffer_observation_state.mean"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "lacking", [without_state_files, without_pipelines, without_the_step, with_empty_files, among_the_weights]
)
def test_statistics_that_were_set_are_read_back(folder, tmp_path, lacking, lora):
    lacking(folder)
    policy = load_policy(folder)
    assert isinstance(policy, SmolVLAPolicy)
    policy.prepare_supervised(FinetunePolicyConfig(), LoraConfig(enabled=lora, rank=2), 0)
    actions, states = values()
    policy.add_statistics("mine", dataset_statistics(actions, states, 2))
    policy.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    loaded.use_statistics(None, "mine")
    scalings = loaded.processor.scalings
    torch.testing.assert_close(scalings.action.stats["mean"], torch.tensor(actions.mean(axis=0)))
    torch.testing.assert_close(scalings.state.stats["std"], torch.tensor(states.std(axis=0)))
    assert scalings.action.mode == scalings.state.mode == "MEAN_STD"
    loaded.save(tmp_path / "again")
    for path in (tmp_path / "saved").glob("*.json"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_lerobot_finds_the_statistics_where_it_looks_for_them(folder, tmp_path):
    """In the state file that each pipeline names, and no second ones among the weights."""
    among_the_weights(folder)
    policy = load_policy(folder)
    actions, states = values()
    policy.add_statistics("mine", dataset_statistics(actions, states, 2))
    policy.save(tmp_path / "saved")
    for name, normalizing in NORMALIZING.items():
        steps = json.loads((tmp_path / "saved" / name).read_text())["steps"]
        (step,) = (step for step in steps if step["registry_name"] == normalizing)
        stored = load_file(tmp_path / "saved" / step["state_file"])
        torch.testing.assert_close(stored["action.mean"], torch.tensor(actions.mean(axis=0)))
        torch.testing.assert_close(stored["observation.state.std"], torch.tensor(states.std(axis=0)))
        assert step["config"]["norm_map"]["ACTION"] == "MEAN_STD"
    assert not any("normalize" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_a_checkpoint_keeps_statistics_of_the_same_dataset_and_no_others(folder, tmp_path, caplog):
    """lerobot's folder does not say which dataset its statistics are of."""
    policy, (actions, states) = load_policy(folder), values()
    before = policy.processor.scalings.action.stats["std"]
    with caplog.at_level(logging.WARNING):
        policy.add_statistics("mine", dataset_statistics(actions, states, 2))
    (record,) = caplog.records
    said = record.getMessage()
    assert "of data that the checkpoint does not name: those of mine are used instead" in said
    assert f"std {float(before[0]):.3g}, " in said and f"std {float(actions[:, 0].std()):.3g}, " in said
    policy.save(tmp_path / "saved")
    saved = load_policy(tmp_path / "saved")
    kept = saved.processor.scalings
    caplog.clear()
    other_actions, other_states = values(2)
    saved.add_statistics("mine", dataset_statistics(other_actions, other_states, 2))
    assert saved.processor.scalings is kept and not caplog.records
    saved.add_statistics("other", dataset_statistics(other_actions, other_states, 2))
    assert "are of mine: those of other are used instead" in caplog.records[0].getMessage()
    torch.testing.assert_close(saved.processor.scalings.action.stats["std"], torch.tensor(other_actions.std(axis=0)))


def test_folders_of_earlier_versions_have_statistics_of_what_they_imitated(folder):
    trained = [{"by": "finetune", "suite": "tabletop_goal"}, {"by": "train", "suite": "libero_goal"}]
    content = {"format": 1, "trained_on": trained, "unknown": []}
    (folder / "training_data.json").write_text(json.dumps(content))
    policy = load_policy(folder)
    kept, found = policy.processor.scalings, dataset_statistics(*values(), 2)
    policy.add_statistics("tabletop", found)
    assert policy.processor.scalings is kept
    policy.add_statistics("libero_goal", found)
    assert policy.processor.scalings is not kept


def test_statistics_that_do_not_fit_are_not_taken(folder, caplog):
    """Deciles are not among the demonstrations' statistics."""
    for name in NORMALIZING:
        (folder / name).write_text((folder / name).read_text().replace("MEAN_STD", "QUANTILE10"))
    for path in folder.glob("policy_*.safetensors"):
        ends = {"q10": -1.0, "q90": 1.0}
        sizes = {"observation.state": 8, "action": 7}
        save_file({f"{f}.{n}": torch.full((size,), end) for f, size in sizes.items() for n, end in ends.items()}, path)
    policy = load_policy(folder)
    kept = policy.processor.scalings
    policy.add_statistics("mine", dataset_statistics(*values(), 2))
    assert policy.processor.scalings is kept
    assert "are kept, because those of mine don't fit" in caplog.records[0].getMessage()


ORDER = (7, 6, 5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_saved_policy_is_used_as_it_was(folder, tmp_path, lora):
    flow = FlowOptions(gripper="signed", state_dims=ORDER)
    policy = load_policy(folder, num_images=1, flow=flow)
    policy.prepare_supervised(FinetunePolicyConfig(), LoraConfig(enabled=lora, rank=2), 0)
    policy.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    assert loaded.num_images == 1 and loaded.processor.state_dims == ORDER and loaded.conventions.gripper == "signed"
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert list(config) == list(json.loads((folder / "config.json").read_text())), "lerobot refuses fields of others"
    plain = tuple(range(8))
    given = load_policy(tmp_path / "saved", num_images=2, flow=FlowOptions(gripper="same", state_dims=plain))
    assert given.num_images == 2 and given.processor.state_dims == plain and given.conventions.gripper == "same"
    given.save(tmp_path / "given")
    assert load_policy(tmp_path / "given").conventions.gripper == "same", "what was given is kept, too"


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "Invalid JSON"), ('{"format": 2}', "format"), ('{"gripper": "left"}', "gripper"), ('{"more": 1}', "more")],
)
def test_a_broken_file_of_conventions_is_named(folder, content, said):
    (folder / FILE_NAME).write_text(content)
    with pytest.raises(UsageError, match=FILE_NAME) as error:
        load_policy(folder)
    assert said in str(error.value) and "copy it again" in str(error.value)


def fingers(pool: TabletopPool, gripper: float) -> float:
    """How far they are apart after some steps with this gripper command."""
    pool.reset([0], [Task("tabletop_spatial", 0, 0, 0)])
    action = np.zeros((1, 1, 7), np.float32)
    action[..., 6] = gripper
    for _ in range(6):
        left, right = pool.step_chunk([0], action)[0].observation.proprio[6:]
    return abs(float(left - right))


def test_a_signed_gripper_opens_and_closes_on_every_suite():
    """-1 opens and 1 closes: the tabletop reads it so, LIBERO and Meta-World read 1 and 0."""
    policy = smolvla(gripper="signed")
    inputs = policy.process([seen(i) for i in range(4)])
    decisions = policy.sample(inputs, policy.noise(range(4), Sampling()), Sampling())
    signed = np.stack(policy.processor.scalings.action_array(decisions.sample.actions))[..., -1]
    policy.use_statistics(None, "libero_spatial")
    np.testing.assert_allclose(np.stack(policy.act(decisions))[..., -1], (1 - signed) / 2, atol=1e-6)
    policy.use_statistics(None, "tabletop_spatial", "tabletop_goal")
    np.testing.assert_array_equal(np.stack(policy.act(decisions))[..., -1], signed)
    pool = TabletopPool("tabletop_spatial", 1, 28)
    assert fingers(pool, -1.0) == fingers(pool, 0.0) > 2 * fingers(pool, 1.0), "which is what makes that right"
    with pytest.raises(UsageError, match="policy.gripper = 'signed' with the suites tabletop_goal, libero_goal"):
        policy.use_statistics(None, "tabletop_goal", "libero_goal")
    smolvla().use_statistics(None, "tabletop_goal", "libero_goal")


def test_demonstrations_are_converted_to_a_signed_gripper():
    """Statistics and targets: what is imitated is what is acted."""
    rng = np.random.default_rng(0)
    actions, states = rng.normal(size=(40, 7)).astype(np.float32), rng.normal(size=(40, 8)).astype(np.float32)
    actions[:, 6] = rng.integers(0, 2, 40)
    converted = actions.copy()
    converted[:, 6] = to_signed(actions[:, 6])
    assert set(converted[actions[:, 6] == 1, 6]) == {-1.0} and set(converted[actions[:, 6] == 0, 6]) == {1.0}
    found = dataset_statistics(actions, states, 2)
    own: Any = dataset_statistics(converted, states, 2)["action"]
    for name, column in signed_statistics(found["action"]).items():
        assert name == "mask" or column == pytest.approx(own[name], abs=1e-12), name
    for suite, wanted in (("libero_goal", converted), ("tabletop", actions)):
        policy = smolvla(gripper="signed", chunk_length=None)
        policy.add_statistics(suite, found)
        policy.use_statistics(None, suite)
        rows = policy.demo_rows(["open"] * 40, states, np.repeat(actions[:, None], 8, axis=1))
        back = policy.processor.scalings.action.unnormalize(rows.actions[:, 0, :7])
        torch.testing.assert_close(back, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
        mean = policy.processor.scalings.action.stats["mean"]
        torch.testing.assert_close(mean, torch.tensor(wanted.mean(axis=0)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("file", ["config.json", "policy_preprocessor.json"])
def test_normalised_images_are_refused(folder, file):
    path = folder / file
    path.write_text(path.read_text().replace('"VISUAL": "IDENTITY"', '"VISUAL": "MEAN_STD"'))
    if file == "config.json":
        without_pipelines(folder)
    with pytest.raises(UsageError, match=r"normalisation of VISUAL is 'MEAN_STD', and only IDENTITY is supported"):
        load_policy(folder)
    (problem,) = describe_checkpoint(folder).problems
    assert "normalisation of VISUAL" in problem, "which vlarl doctor says, too"


@pytest.mark.parametrize("file", NORMALIZING)
@pytest.mark.parametrize("step", [{"registry_name": "delta_actions_processor"}, {"class": "mine.Clip"}])
def test_steps_that_are_not_known_are_refused(folder, file, step):
    content = json.loads((folder / file).read_text())
    content["steps"].append({**step, "config": {}})
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(UsageError) as error:
        load_policy(folder)
    (name,) = step.values()
    assert f"{file} has the step '{name}', which is not supported" in str(error.value)
    assert [f"the step '{name}'" in problem for problem in describe_checkpoint(folder).problems] == [True]
