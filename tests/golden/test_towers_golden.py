"""Our vision towers against timm's own, each architecture at toy size (see towers/generate.py)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.float_error import FloatJudge, exactly

from vlarl.policies.openvla.towers import KNOWN_TOWERS, TowerConfig, default_activation
from vlarl.policies.openvla.vision import VisionBackbone

FOLDER = Path(__file__).parent / "towers"
TOWERS = {
    "dinov2": "vit_large_patch14_reg4_dinov2.lvd142m",
    "siglip_so400m": "vit_so400m_patch14_siglip_384",
    "siglip_b16": "vit_base_patch16_siglip_256",
    "clip_b": "vit_base_patch16_clip_224.openai",
    "clip_l": "vit_large_patch14_clip_336.openai",
    "in1k": "vit_large_patch16_224.augreg_in21k_ft_in1k",
}


def toy(name: str) -> TowerConfig:
    timm_id = TOWERS[name]
    sizes = {"image_size": 36, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return replace(KNOWN_TOWERS[timm_id], activation=default_activation(timm_id), **sizes)


def load(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, np.ndarray]:
    arrays = np.load(FOLDER / f"{name}.npz")
    state = {k.removeprefix("state/"): torch.from_numpy(arrays[k]) for k in arrays if k.startswith("state/")}
    return state, torch.from_numpy(arrays["pixels"]), arrays["features"]


def check_original(backbone: VisionBackbone, pixels: torch.Tensor, features: np.ndarray) -> None:
    """The original's float32 features are as near to ours in float64 as ours in float32 are."""
    exact = exactly(backbone, lambda towers: towers(pixels.double()))
    FloatJudge.of(exact, backbone(pixels)).check(torch.from_numpy(features))


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_timms_names_and_features(name):
    state, pixels, expected = load(name)
    backbone = VisionBackbone((toy(name),))
    wanted = {f"featurizer.{key}": value.shape for key, value in state.items()}
    assert {key: value.shape for key, value in backbone.state_dict().items()} == wanted
    backbone.load_state_dict({f"featurizer.{key}": value for key, value in state.items()})
    check_original(backbone, pixels, expected)


def test_fused_towers_stand_side_by_side():
    names = ("dinov2", "clip_l")
    backbone = VisionBackbone((toy(names[0]), toy(names[1])))
    parts = dict(zip(("featurizer", "fused_featurizer"), map(load, names), strict=True))
    backbone.load_state_dict({f"{p}.{k}": v for p, (state, _, _) in parts.items() for k, v in state.items()})
    pixels = torch.cat([pixels for _, pixels, _ in parts.values()], dim=1)
    expected = np.concatenate([features for _, _, features in parts.values()], axis=2)
    check_original(backbone, pixels, expected)
