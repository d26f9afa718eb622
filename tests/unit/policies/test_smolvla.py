"""SmolVLA's folders and options: statistics of every kind, mappings to the robot, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.smolvla import FOLDER, seen, smolvla
from safetensors.torch import load_file, save_file

from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.family import FlowOptions
from vlarl.policies.load import describe_checkpoint, load_policy
from vlarl.policies.smolvla.config import _shifts_positions, read_config
from vlarl.policies.smolvla.statistics import Scaling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "policy"
    shutil.copytree(FOLDER, copied, ignore=shutil.ignore_patterns("*.npz"))
    return copied


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("mode", "stats", "normalized"),
    [
        ("IDENTITY", {}, [1.0, -3.0]),
        ("MEAN_STD", {"mean": [0.0, 1.0], "std": [2.0, 4.0]}, [0.5, -1.0]),
        ("MIN_MAX", {"min": [0.0, -4.0], "max": [2.0, 0.0]}, [0.0, -0.5]),
        ("QUANTILES", {"q01": [-1.0, -3.0], "q99": [3.0, 5.0]}, [0.0, -1.0]),
        ("QUANTILE10", {"q10": [-1.0, -3.0], "q90": [1.0, 5.0]}, [1.0, -1.0]),
    ],
)
def test_values_are_normalised_as_the_statistics_say(mode, stats, normalized):
    scaling = Scaling(mode, {name: torch.tensor(values) for name, values in stats.items()})
    values = torch.tensor([1.0, -3.0])
    torch.testing.assert_close(scaling.normalize(values), torch.tensor(normalized))
    torch.testing.assert_close(scaling.unnormalize(scaling.normalize(values)), values)
    assert scaling.problem(2) == ""
    assert mode == "IDENTITY" or "for 3 dimensions" in scaling.problem(3)


def test_statistics_that_are_missing_are_named_before_a_run_starts(folder):
    for path in folder.glob("policy_*"):
        path.unlink()
    policy = load_policy(folder)
    with pytest.raises(UsageError, match="the statistics of the state can't be used: they have no mean"):
        policy.use_statistics(None, "tabletop_spatial")
    with pytest.raises(UsageError, match="has one set of statistics; leave it out"):
        load_policy(FOLDER).use_statistics("libero_goal", "tabletop_spatial")


def test_a_signed_gripper_becomes_the_suites(folder):
    """lerobot's -1 opens and 1 closes; the suite's 1 opens and 0 closes. The other dimensions stay."""
    plain, signed = smolvla(), smolvla(gripper="signed")
    inputs = plain.process([seen(0)])
    decisions = plain.sample(inputs, plain.noise([0], Sampling()), Sampling())
    (before,), (after,) = plain.act(decisions), signed.act(decisions)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    np.testing.assert_allclose(after[:, -1], (1 - before[:, -1]) / 2, atol=1e-6)


def test_the_state_is_made_of_the_dimensions_that_are_named():
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    turned, plain, observed = smolvla(state_dims=order), smolvla(), seen(0)
    expected = plain.processor.states(observed.proprio[None, ::-1])
    assert torch.equal(turned.process([observed]).state, expected)
    with pytest.raises(ValueError, match="names dimension 9 of a state of 8 values"):
        smolvla(state_dims=(9,)).process([observed])
    with pytest.raises(ValueError, match="has 6 values, this policy reads 8: say which ones with policy.state_dims"):
        plain.processor.states(np.zeros((1, 6), np.float32))


def test_fewer_views_can_be_read_and_no_more():
    policy = load_policy(FOLDER, num_images=1)
    assert policy.num_images == 1 and policy.process([seen(0)]).pixels.shape[1] == 1
    with pytest.raises(UsageError, match="policy.num_images = 3: the checkpoint has 2 views"):
        load_policy(FOLDER, num_images=3)


def test_a_long_instruction_is_cut_and_ends_where_the_original_cuts_it():
    policy = smolvla()
    tokens, mask = policy.processor.instructions(["x" * 500, "y"])
    assert tokens.shape[1] == policy.config.max_tokens and mask.sum(dim=1).tolist() == [policy.config.max_tokens, 2]


def test_padding_of_an_instruction_changes_nothing():
    policy = smolvla()
    inputs = policy.process([seen(0), seen(1)])
    assert inputs.rounded_up().tokens.shape[1] % 8 == 0
    noise = policy.noise([0, 1], Sampling())
    one, two = (policy.sample(given, noise, Sampling()) for given in (inputs, inputs.rounded_up()))
    torch.testing.assert_close(one.sample.actions, two.sample.actions, atol=1e-5, rtol=0)


def test_empty_cameras_change_nothing(folder):
    """They are masked: nothing attends to them, and they take no position."""
    features = json.loads((folder / "config.json").read_text())["input_features"]
    empty = {"observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]}}
    change(folder / "config.json", input_features={**features, **empty}, empty_cameras=1)
    assert load_policy(folder).num_images == 2


@pytest.mark.parametrize(
    ("version", "shifted"),
    [("4.47.1", False), ("4.55.0", False), ("4.55.1", True), ("4.57.6", True), ("5.19.0", False), (None, False)],
)
def test_positions_of_patches_are_those_of_the_librarys_version(version, shifted):
    assert _shifts_positions(version) == shifted


def test_patches_of_bfloat16_have_their_own_positions():
    wide, narrow = (smolvla(dtype=dtype).model.backbone.vision_model.embeddings for dtype in ("float32", "bfloat16"))
    assert wide.shifted and narrow.shifted
    assert not torch.equal(wide._positions(), wide.position_embedding.weight)
    assert torch.equal(narrow._positions(), narrow.position_embedding.weight)


def test_frozen_weights_are_saved_in_the_type_that_they_were_read_in(folder, tmp_path):
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    policy = smolvla(folder)
    policy.prepare_training(PolicyConfig(), LoraConfig(), seed=0)
    with torch.no_grad():
        policy.model.action_out_proj.weight.add_(1e-6)
    policy.save(tmp_path / "saved")
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {"model.action_out_proj.weight"}


# What is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_mode": "self_attn"}, "attention_mode is 'self_attn', and only 'cross_attn' is supported"),
        ({"add_image_special_tokens": True}, "add_image_special_tokens is True"),
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is True"),
        ({"resize_imgs_with_padding": [32, 64]}, "the backbone's tower reads 64 pixels a side"),
        ({"num_expert_layers": 2}, "num_expert_layers is 2: only as many as the language model's 4 are supported"),
        ({"n_action_steps": 9}, "n_action_steps is '9', which must be a whole number from 1 to 8"),
        ({"chunk_size": 1e12}, "chunk_size is '1000000000000.0', which must be a whole number from 1"),
        ({"input_features": {}}, "its features lack an image, observation.state or action"),
        ({"input_features": 3}, "input_features of config.json must be an object of features"),
        ({"max_action_dim": 3}, "max_action_dim is '3', which must be a whole number from 7"),
        ({"num_vlm_layers": 3}, "don't fit its config.json; unexpected"),
        ({"normalization_mapping": {"STATE": "LOG"}, "type": "smolvla"}, ""),
        ({"vlm_model_name": "../outside"}, "is neither a folder nor a hub id"),
    ],
)
def test_folders_that_can_not_be_read_say_why(folder, fields, said):
    change(folder / "config.json", **fields)
    if not said:  # the pipelines say how values are normalised, whatever config.json says
        assert load_policy(folder).processor.scalings.state.mode == "MEAN_STD"
        return
    with pytest.raises(UsageError) as error:
        load_policy(folder)
    assert said in str(error.value)


def test_a_backbone_of_another_kind_is_refused(folder):
    change(folder / "vlm" / "config.json", model_type="idefics3")
    with pytest.raises(UsageError, match="its backbone is of type 'idefics3', and only SmolVLM is supported"):
        load_policy(folder)


def test_a_state_file_outside_the_folder_is_refused(folder):
    path = folder / "policy_preprocessor.json"
    path.write_text(path.read_text().replace('"policy_preprocessor_step_5', '"../policy_preprocessor_step_5'))
    with pytest.raises(UsageError, match="which is not a file beside it"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decoder": "parallel"}, "policy.decoder = 'parallel': a SmolVLA policy has no such option"),
        ({"actions": "l1"}, "policy.actions = 'l1': a SmolVLA policy has no such option"),
        ({"chunk_length": 9}, "policy.chunk_length = 9: the expert predicts 8 actions"),
        ({"flow": FlowOptions(noise="cps", stochastic_step=4)}, "the stochastic step 4 is not one of the steps"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options, said):
    with pytest.raises(UsageError) as error:
        load_policy(FOLDER, **options)
    assert said in str(error.value)


def test_options_of_flow_policies_are_refused_by_other_families():
    with pytest.raises(UsageError, match="policy.flow_noise, policy.gripper is for flow policies such as SmolVLA"):
        load_policy("builtin:tiny-oft", flow=FlowOptions(noise="cps", gripper="signed"))


def test_doctor_names_weights_that_do_not_fit(folder):
    assert describe_checkpoint(FOLDER).problems == ()
    change(folder / "config.json", num_vlm_layers=3)
    (problem,) = describe_checkpoint(folder).problems
    assert problem.startswith("unexpected (18): model.vlm_with_expert.lm_expert.layers.3")


def test_sizes_that_the_backbone_leaves_out_are_the_librarys():
    config = read_config(FOLDER, FOLDER / "vlm")
    assert config.text.layers == 4, "of the backbone's five"
    assert config.expert.inner == 256 and config.expert.hidden == 36
