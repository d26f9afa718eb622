"""Damaged or untrusted checkpoints: the weight files bound the size of the model, and each is refused in one line that
names the file."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vlarl.errors import UsageError
from vlarl.policies.checkpoint_json import whole
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.components import read_component
from vlarl.policies.openvla.config import read_config
from vlarl.policies.tiny import init_tiny, tiny_config
from vlarl.policies.weight_files import INDEX_NAME, weight_files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    init_tiny("parallel", seed=1).save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as refused:
        load_policy(folder)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)
    return str(refused.value)


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda c: c["vlarl"].update(chunk_length=0),
            "chunk_length is '0', which must be a whole number from 1 to 4096",
        ),
        (lambda c: c["vlarl"].update(chunk_length=10**9), "chunk_length is '1000000000', which must be"),
        (lambda c: c["vlarl"].update(action_dim="7"), "action_dim is '7', which must be a whole number"),
        (lambda c: c["vlarl"].update(num_images=1e300), r"config.json: num_images is '1e\+300', which must be"),
        (lambda c: c["vlarl"].update(prompt_template="{instruction:>99999999999}"), "prompt_template is"),
        (lambda c: c["vlarl"].update(prompt_template="{instruction.__class__}"), "prompt_template is"),
        (lambda c: c.update(n_action_bins=10**12), "n_action_bins is '1000000000000', which must be"),
        (lambda c: c.update(image_sizes=[10**6] * 2), "image_sizes is '1000000', which must be"),
        (lambda c: c.update(norm_stats=[1]), "norm_stats is a list"),
        (lambda c: c["text_config"].update(num_hidden_layers=10**6), "config.json describes 1,000,010 layers"),
        (lambda c: c["text_config"].update(hidden_size=10**7), "parameters or more, but the weight files of"),
        (lambda c: c["text_config"].update(hidden_size="wide"), "text_config can't be read"),
        (lambda c: c["text_config"].update(hidden_size=0), "hidden_size of text_config is '0'"),
        (lambda c: c["text_config"].update(head_dim=10**17), "a model that can't be built"),
        (lambda c: c["timm_model_kwargs"][0].update(depth=10**6), "config.json describes 1,000,008 layers"),
        (lambda c: c["timm_model_kwargs"][0].update(num_heads=0), "num_heads of vit_large"),
        (lambda c: c["timm_model_kwargs"][0].update(mlp_ratio="x"), "mlp_ratio of vit_large"),
        (lambda c: c["timm_model_kwargs"][0].update(num_heads=3), "embed_dim 128 of vit_large.* is not a multiple of"),
    ],
)
def test_a_config_far_larger_than_its_files_is_refused(folder, change, reason):
    edit(folder / "config.json", change)
    message = refusal(folder)
    assert re.search(reason, message), message


def test_a_vocabulary_of_10_to_the_12_takes_no_memory(folder):
    edit(folder / "config.json", lambda c: c["text_config"].update(vocab_size=10**12))
    edit(folder / "config.json", lambda c: c["vlarl"].pop("vocab_size"))
    assert "160,000," in refusal(folder)


def test_what_is_whole_and_what_is_not():
    assert whole(7, "x", 1, 7) == whole(7.0, "x", 1) == 7
    for value in (True, "7", None, 7.5, float("nan"), float("inf"), 0, 8, [7]):
        with pytest.raises(ValueError, match="x is .* whole number from 1 to 7"):
            whole(value, "x", 1, 7)


@pytest.mark.parametrize(
    "name", ["sub", "../tiny/model.safetensors", "/etc/passwd", "", "model.bin", "a" * 999, "x\0.safetensors"]
)
def test_an_index_names_files_of_its_own_folder(folder, name):
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=rf"{INDEX_NAME} names .*, which is not the name of a safetensors file in the"):
        weight_files(folder)


def test_an_index_of_nothing_is_refused(folder):
    (folder / INDEX_NAME).write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="names no files"):
        weight_files(folder)


def spoil(path: Path, change) -> str:
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, path)
    return name


def test_integer_weights_are_named(folder):
    name = spoil(folder / "model.safetensors", lambda t: t.to(torch.int32))
    assert f"model.safetensors: {name} is stored as int32, and weights must be floats" in refusal(folder)


def test_integer_weights_of_a_component_are_named(folder):
    name = spoil(folder / "proprio_projector.safetensors", lambda t: t.to(torch.int8))
    assert f"proprio_projector.safetensors: {name} is stored as int8, and weights" in refusal(folder)


def test_weights_that_are_not_finite_are_named_as_such(folder):
    spoil(folder / "model.safetensors", lambda t: t.fill_(float("nan")))
    message = refusal(folder)
    assert "1 of its weights hold NaN or infinity, the first is" in message and "optim.lr" not in message


def test_a_component_file_without_tensors_is_refused(tmp_path):
    torch.save({}, tmp_path / "action_head--5_checkpoint.pt")
    with pytest.raises(ValueError, match="does not contain named tensors: it is empty"):
        read_component(tmp_path, "action_head")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"means": [[0.5] * 3] * 2, "stds": [[0.0] * 3] * 2}, "stds above 0, got"),
        ({"means": [[float("nan")] * 3] * 2, "stds": [[0.5] * 3] * 2}, "must be numeric"),
        ({"means": [[None] * 3] * 2, "stds": [[0.5] * 3] * 2}, "must be numeric"),
        ({"means": 7, "stds": [1]}, "must be lists"),
    ],
)
def test_pixel_statistics_that_cannot_be_are_refused(folder, content, reason):
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    message = refusal(folder)
    assert "preprocessor_config.json" in message and reason in message


def statistics(**action) -> dict:
    usual = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    return {"action": usual | action, "proprio": {"q01": [-1.0] * 8, "q99": [1.0] * 8}}


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ({"q01": [-1.0] * 6}, r"q01 has the shape \[6\] for 7 dimensions"),
        ({"mask": [True]}, r"mask has the shape \[1\] for 7 dimensions"),
        ({"q99": [1.0, float("inf"), *[1.0] * 5]}, "q01 is -1.0 and q99 is inf in dimension 1"),
        ({"q01": [*[-1.0] * 5, float("nan"), -1.0]}, "q01 is nan and q99 is 1.0 in dimension 5"),
        ({"q99": [*[1.0] * 3, -2.0, *[1.0] * 3]}, r"q99 \(-2.0\) is not larger than q01 \(-1.0\) in dimension 3"),
        ({"q99": [-1.0, *[1.0] * 6]}, r"q99 \(-1.0\) is not larger than q01 \(-1.0\) in dimension 0"),
        ({"q01": ["a"] * 7}, "contains a value that is not numeric"),
        ({"mask": ["no"] * 7}, "contains a value that is not numeric"),
    ],
)
def test_statistics_that_give_no_units_are_refused_with_file_key_and_dimension(folder, action, reason):
    (folder / "dataset_statistics.json").write_text(json.dumps({"mine": statistics(**action)}))
    policy = load_policy(folder, device="meta")
    with pytest.raises(UsageError, match=reason) as refused:
        policy.use_statistics("mine", "tabletop_easy")
    assert "'mine'" in str(refused.value)
    if "numeric" not in reason:
        assert str(folder / "dataset_statistics.json") in str(refused.value)


def test_what_the_mask_leaves_alone_and_what_never_moves_is_accepted():
    """The gripper of real statistics is not normalised; rotations of some of OpenVLA's datasets are 0 throughout."""
    constant = {"q01": [-1.0, 0.0, *[-1.0] * 4, 0.0], "q99": [1.0, 0.0, *[1.0] * 4, 0.0]}
    bounds = {"min": [-1.0, 0.0, *[-1.0] * 5], "max": [1.0, 0.0, *[1.0] * 5]}
    config = tiny_config(norm_stats={"mine": statistics(**constant, **bounds)})
    normalizer = Normalizer(config, "mine")
    normalizer.check(7, 8)
    np.testing.assert_allclose(normalizer.unnormalize(np.full(7, 0.5))[[0, 1, 6]], [0.5, 0.0, 0.5], atol=1e-7)


def test_proprio_statistics_count_where_the_policy_reads_them():
    stats = statistics() | {"proprio": {"q01": [0.0] * 8, "q99": [0.0] * 8}}
    normalizer = Normalizer(tiny_config(norm_stats={"mine": stats}), "mine")
    normalizer.check(7, None)
    with pytest.raises(ValueError, match=r"the proprio statistics 'mine' can't be used: q99 \(0.0\) is not larger"):
        normalizer.check(7, 8)


def test_a_file_that_is_not_json_is_named(folder):
    for content in (b"{", b"\xff\xfe", b"[" * 100_000):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match="config.json is not valid JSON"):
            read_config(folder)
