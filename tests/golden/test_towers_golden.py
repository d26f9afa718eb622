"""Our vision towers against timm's own, each architecture at toy size (see towers/generate.py)."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes.golden_arrays import Arrays, assert_close, constant, load_arrays, rounding, stored_state, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.policies.openvla.towers import KNOWN_TOWERS, TowerConfig, default_activation
from vlarl.policies.openvla.vision import VisionBackbone

FOLDER = golden_folder("towers")
TOWERS = {
    "dinov2": "vit_large_patch14_reg4_dinov2.lvd142m",
    "siglip_so400m": "vit_so400m_patch14_siglip_384",
    "siglip_b16": "vit_base_patch16_siglip_256",
    "clip_b": "vit_base_patch16_clip_224.openai",
    "clip_l": "vit_large_patch14_clip_336.openai",
    "in1k": "vit_large_patch16_224.augreg_in21k_ft_in1k",
}


def toy(name: str, arrays: Arrays) -> TowerConfig:
    """The architecture at the size of the file's weights and pixels."""
    blocks = {key.split(".")[1] for key in arrays if key.startswith("state/blocks.")}
    return replace(
        KNOWN_TOWERS[TOWERS[name]],
        activation=default_activation(TOWERS[name]),
        image_size=arrays["pixels"].shape[-1],
        embed_dim=arrays["state/patch_embed.proj.weight"].shape[0],
        depth=len(blocks),
        num_heads=int(constant(arrays, "num_heads")),
    )


def check_tower(name: str, arrays: Arrays) -> None:
    """timm's names and shapes, and its features of the second-to-last block."""
    state = {f"featurizer.{key}": value for key, value in stored_state(arrays).items()}
    backbone = VisionBackbone((toy(name, arrays),))
    assert {k: v.shape for k, v in backbone.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert_features(backbone, state, torch.from_numpy(arrays["pixels"]), arrays["features"])


def assert_features(backbone, state, pixels, features) -> None:
    backbone.load_state_dict(state)
    ours, exact = backbone(pixels).detach(), backbone.double()(pixels.double()).detach()
    assert_close(ours, features, rounding(ours, exact, features))


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_timms_names_and_features(name):
    check_tower(name, load_arrays(FOLDER / f"{name}.npz"))


@pytest.mark.parametrize("name", TOWERS)
def test_every_golden_array_is_compared(name):
    """Weights are, since `load_state_dict` takes exactly those that the model has."""
    arrays = load_arrays(FOLDER / f"{name}.npz")
    assert unnoticed(arrays, [partial(check_tower, name)], but_for="state/") == []


def test_fused_towers_stand_side_by_side():
    parts = {"featurizer": "dinov2", "fused_featurizer": "clip_l"}
    arrays = {part: load_arrays(FOLDER / f"{name}.npz") for part, name in parts.items()}
    first, second = (toy(name, arrays[part]) for part, name in parts.items())
    pixels = [torch.from_numpy(a["pixels"]) for a in arrays.values()]
    features = [torch.from_numpy(a["features"]) for a in arrays.values()]
    state = {f"{part}.{key}": value for part, a in arrays.items() for key, value in stored_state(a).items()}
    assert_features(
        VisionBackbone((first, second)), state, torch.cat(pixels, dim=1), torch.cat(features, dim=2).numpy()
    )
