"""An OpenVLA-OFT folder with FiLM, as its trainer writes it: the vision backbone in a file of its own."""

import json
import re
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from vlarl.policies.load import describe_checkpoint, load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer


def test_the_backbone_is_read_from_its_own_file_and_kept_with_the_model_when_saved(tmp_path):
    config = replace(tiny_config("parallel", 8, use_proprio=False, learned_slots=False), use_film=True)
    policy = OpenVLAPolicy(config, build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(0))
    folder = tmp_path / "oft"
    policy.save(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "vlarl"}))
    state = load_file(folder / "model.safetensors")
    vision = {name: tensor for name, tensor in state.items() if name.startswith("vision_backbone.")}
    inner = re.compile(r"(\.blocks\.\d+)\.(?!scale|shift)")
    torch.save(
        {inner.sub(r"\1.block.", name): tensor for name, tensor in vision.items()},
        folder / "vision_backbone--7_checkpoint.pt",
    )
    plain = {
        n: torch.zeros_like(t) if n in vision else t for n, t in state.items() if not re.search(r"scale\.|shift\.", n)
    }
    save_file(plain, folder / "model.safetensors")

    loaded = load_policy(folder)
    assert loaded.config.use_film and loaded.config.decoder == "parallel"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 700, (2, 9), generator=generator)
    pixels = torch.randint(0, 256, (2, 1, 3, 56, 56), generator=generator).to(torch.uint8)
    tokens = torch.full((2, 56), policy.codec.first_id)
    with torch.no_grad():
        expected = policy.action_logits(ids, pixels, tokens)
        assert torch.equal(loaded.action_logits(ids, pixels, tokens), expected)
    description = describe_checkpoint(folder)
    assert description.config.use_film and not description.problems

    loaded.save(tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("vision_backbone--*"))
    with torch.no_grad():
        assert torch.equal(load_policy(tmp_path / "ours").action_logits(ids, pixels, tokens), expected)
