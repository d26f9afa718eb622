"""A merge says how much of an adapter the type of its weights holds, and warns of one that it can't hold."""

import json
from pathlib import Path

import pytest
import torch

from vlarl.cli import main
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.load import load_policy


def save_adapter(folder: Path, size: float) -> Path:
    """An adapter on a built-in model whose B has this size; the default scale of its rank is 0.5."""
    policy = load_policy("builtin:tiny-openvla")
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=32, target_modules=("q_proj", "fc1")), seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator).sign())
    policy.save(folder)
    return folder


@pytest.mark.parametrize(
    ("size", "dtype", "least", "most"),
    [(8e-5, "bfloat16", 0.0, 0.5), (8e-5, "float32", 0.99, 1.01), (0.05, "bfloat16", 0.97, 1.03)],
)
def test_how_much_is_kept_is_said_and_warned_of(size, dtype, least, most, tmp_path, capsys):
    adapter = save_adapter(tmp_path / "adapter", size)
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--dtype", dtype]) == 0
    metadata = json.loads((tmp_path / "out" / "merge_metadata.json").read_text())
    kept = metadata["adapter_fraction_kept"]
    assert least <= kept <= most
    base = load_policy("builtin:tiny-openvla").model.state_dict()
    merged = load_policy(tmp_path / "out").model.state_dict()
    adapted = load_policy(adapter)
    found = whole = 0.0
    for name, layer in adapted.model.named_modules():
        if hasattr(layer, "lora_A"):
            delta = layer.get_delta_weight("default").double()
            found += float(((merged[f"{name}.weight"].double() - base[f"{name}.weight"].double()) * delta).sum())
            whole += float(delta.square().sum())
    assert kept == pytest.approx(found / whole, abs=0.01), "what is said is what is in the files"
    said = capsys.readouterr()
    if dtype == "bfloat16":
        assert f"adapter:     {kept:.1%} of it remains in bfloat16 weights" in said.out
    warned = f"warning: only {kept:.0%} of the adapter is left in {dtype} weights"
    assert (warned in said.err) == (kept < 0.95)
    assert ("merge with --dtype float32, or use the adapter as it is" in said.err) == (kept < 0.95)
