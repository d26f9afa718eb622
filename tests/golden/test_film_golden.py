"""Our FiLM against the original OpenVLA-OFT wrapper, with the LoRA that its trainer adds (see film/generate.py)."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.golden_arrays import Arrays, assert_close, constant, load_arrays, rounding, stored_state, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.policies.openvla import decoders
from vlarl.policies.openvla.film import fold_film_state
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.towers import KNOWN_TOWERS, TowerConfig
from vlarl.policies.openvla.vision import VisionBackbone
from vlarl.policies.tiny import tiny_config

PARTS = {
    "featurizer": "vit_large_patch14_reg4_dinov2.lvd142m",
    "fused_featurizer": "vit_so400m_patch14_siglip_224",
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_arrays(golden_folder("film") / "film.npz")


def tower(arrays: Arrays, part: str) -> TowerConfig:
    """At the size of the file's weights and pixels."""
    prefix = f"state/vision_backbone.{part}."
    blocks = {name.split(".")[3] for name in arrays if name.startswith(f"{prefix}blocks.")}
    return replace(
        KNOWN_TOWERS[PARTS[part]],
        image_size=arrays["pixels"].shape[-1],
        embed_dim=arrays[f"{prefix}norm.weight"].shape[0],
        depth=len(blocks),
        num_heads=int(constant(arrays, "num_heads")),
    )


def backbone(arrays: Arrays) -> VisionBackbone:
    first, second = (tower(arrays, part) for part in PARTS)
    return VisionBackbone((first, second), arrays["language"].shape[-1])


@torch.no_grad()
def features(arrays: Arrays, dtype: torch.dtype = torch.float32, alpha: int | None = None) -> torch.Tensor:
    ours = backbone(arrays)
    ours.load_state_dict(fold_film_state(stored_state(arrays), alpha))
    pixels, language = (torch.from_numpy(arrays[name]).to(dtype) for name in ("pixels", "language"))
    return ours.to(dtype)(pixels, language)


def check_features(arrays: Arrays) -> None:
    """Of several images a row."""
    ours, theirs = features(arrays), arrays["features"]
    assert_close(ours, theirs, rounding(ours, features(arrays, torch.float64), theirs))


def check_average(arrays: Arrays) -> None:
    """What FiLM reads: the mean over the prompt and the stop token."""
    table = torch.from_numpy(arrays["embedding"])
    model = film_model()
    model.embed_tokens = lambda ids: table[ids]  # type: ignore[method-assign]
    text = table[torch.from_numpy(arrays["input_ids"])[None]]
    ours = decoders._mean_embedding(model, text, None)
    assert_close(ours[0], arrays["language_mean"], 1e-6)


@pytest.mark.parametrize("check", [check_features, check_average])
def test_equals_the_original(golden, check):
    check(golden)


def test_every_golden_array_is_compared(golden):
    """Weights are, since `load_state_dict` takes exactly those that the model has."""
    assert unnoticed(golden, [check_features, check_average], but_for="state/") == []


def test_the_fold_needs_the_trainers_alpha(golden):
    """Which is the rank, but no more than 16."""
    adapters = [name for name in golden if ".lora_A." in name]
    assert any("patch_embed.proj" in name for name in adapters)  # the convolution is adapted, too
    alpha = min(golden[adapters[0]].shape[0], 16)
    assert torch.equal(features(golden, alpha=alpha), features(golden))
    assert np.abs(features(golden, alpha=alpha + 4).numpy() - golden["features"]).max() > 1e-2


def test_a_state_without_adapters_is_only_renamed(golden):
    names = list(backbone(golden).state_dict())
    film = (".scale.", ".shift.")
    theirs = {n: n if any(f in n for f in film) else re.sub(r"(blocks\.\d)", r"\1.block", n) for n in names}
    state = {f"vision_backbone.{theirs[n]}": torch.tensor(float(i)) for i, n in enumerate(names)}
    assert fold_film_state(state) == {n: float(i) for i, n in enumerate(names)}


def film_model() -> OpenVLAModel:
    config = tiny_config("parallel", use_proprio=False).with_decoder(use_film=True)
    torch.manual_seed(0)
    return OpenVLAModel(config)


def test_each_row_of_a_ragged_batch_gets_its_own_prompt():
    model = film_model()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 1, 3, 56, 56), generator=generator).to(torch.uint8)
    short, long = [1, 300, 301], [1, 300, 302, 303, 304, 305]
    ids = torch.tensor([[*short, 3, 3, 3], long])
    batch = OpenVLAInputs(ids, ids != 3, pixels, None)
    decoder = decoders.ParallelDecoder(model.config.num_action_tokens)
    together = decoder.states(model, decoders.embed_prefix(model, batch, None), ids)
    for row, prompt in enumerate((short, long)):
        alone = torch.tensor([prompt])
        one = OpenVLAInputs(alone, torch.ones_like(alone, dtype=torch.bool), pixels[row : row + 1], None)
        states = decoder.states(model, decoders.embed_prefix(model, one, None), alone)
        torch.testing.assert_close(together[row], states[0], atol=1e-5, rtol=1e-5)


def test_the_prompt_matters_and_is_required():
    model = film_model()
    pixels = torch.zeros(1, 1, 3, 56, 56, dtype=torch.uint8)
    one, other = (model.embed_images(pixels, torch.full((1, model.hidden_size), v)) for v in (0.1, 0.2))
    assert (one - other).abs().max() > 1e-3
    with pytest.raises(ValueError, match="needs the mean embedding"):
        model.embed_images(pixels)
    with pytest.raises(ValueError, match="use decoder 'parallel'"):
        model.config.with_decoder("autoregressive")
