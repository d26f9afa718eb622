"""Our SmolVLA against arrays computed by lerobot's own code."""

from dataclasses import replace

import pytest
import torch
from fakes.golden_arrays import load_arrays, unnoticed
from safetensors.torch import load_file, save_file
from smolvla_comparisons import CHECKS, FOLDER, TOLERANCE, Golden, check_actions, load

from vlarl.policies.load import load_policy
from vlarl.policies.smolvla.checkpoint import read_policy


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load()


@pytest.mark.parametrize("check", CHECKS)
def test_equals_the_original(golden, check):
    check(golden)


def test_every_golden_array_is_compared(golden):
    checks = [lambda arrays, check=check: check(Golden(arrays, golden.policy)) for check in CHECKS]
    assert unnoticed(golden.arrays, checks) == []


def test_a_row_is_the_same_alone(golden):
    """Without the padding that the longer instructions of its batch cause."""
    for row in range(len(golden.inputs)):
        tokens = golden.inputs.token_mask[row].sum()
        alone = golden.inputs.rows(slice(row, row + 1))
        alone = replace(alone, tokens=alone.tokens[:, :tokens], token_mask=alone.token_mask[:, :tokens])
        with torch.no_grad():
            times = golden.tensor("t_0").float().expand(1)
            velocity, _ = golden.policy._field(golden.policy.prefix(alone), golden.tensor("x_0")[row : row + 1], times)
        torch.testing.assert_close(velocity[0], golden.tensor("velocity_0")[row], atol=TOLERANCE, rtol=0)


def test_a_saved_folder_has_the_same_tensors_and_files(golden, tmp_path):
    golden.policy.save(tmp_path)
    for name in sorted(path.name for path in FOLDER.glob("*.safetensors")):
        theirs, ours = load_file(FOLDER / name), load_file(tmp_path / name)
        assert theirs.keys() == ours.keys()
        for key, tensor in theirs.items():
            assert tensor.dtype == ours[key].dtype and torch.equal(tensor, ours[key]), key
    for path in [*FOLDER.glob("policy_*.json"), *FOLDER.glob("vlm/*")]:
        assert (tmp_path / path.relative_to(FOLDER)).read_bytes() == path.read_bytes()
    import json

    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((FOLDER / "config.json").read_text())
    check_actions(Golden(load_arrays(FOLDER / "expected.npz"), load_policy(tmp_path)))


def old_folder(tmp_path) -> None:
    """As lerobot wrote it before there were pipelines: statistics are buffers, and names tell of torch.compile."""
    golden = read_policy(FOLDER, FOLDER)
    golden.save(tmp_path)
    scalings = golden.processor.scalings
    buffers = {
        f"{owner}.{feature}.{name}": tensor.contiguous()
        for owner, feature, scaling in (
            ("normalize_inputs", "buffer_observation_state", scalings.state),
            ("normalize_targets", "buffer_action", scalings.action),
            ("unnormalize_outputs", "buffer_action", scalings.action),
        )
        for name, tensor in ((n, t.clone()) for n, t in scaling.stats.items())
    }
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model._orig_mod.", 1): tensor for name, tensor in weights.items()}
    save_file({**renamed, **buffers}, tmp_path / "model.safetensors")
    for path in tmp_path.glob("policy_*"):
        path.unlink()


def test_an_older_folder_has_its_statistics_among_the_weights(tmp_path):
    old_folder(tmp_path)
    check_actions(Golden(load_arrays(FOLDER / "expected.npz"), load_policy(tmp_path)))
    again = tmp_path / "again"
    load_policy(tmp_path).save(again)
    check_actions(Golden(load_arrays(FOLDER / "expected.npz"), load_policy(again)))
    buffers = {name for name in load_file(again / "model.safetensors") if "buffer_" in name}
    assert "unnormalize_outputs.buffer_action.std" in buffers and len(buffers) == 6
