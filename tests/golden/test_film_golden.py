"""Our FiLM against the original OpenVLA-OFT wrapper, with the LoRA that its trainer adds (see film/generate.py)."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.float_error import FloatJudge, exactly

from vlarl.policies.openvla import decoders
from vlarl.policies.openvla.film import fold_film_state
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.towers import KNOWN_TOWERS
from vlarl.policies.openvla.vision import VisionBackbone
from vlarl.policies.tiny import tiny_config
from vlarl.types import PolicyInput

TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
LLM_DIM = 24


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parent / "film" / "film.npz"))


@pytest.fixture(scope="module")
def state(golden) -> dict[str, torch.Tensor]:
    """The original file's, in float32."""
    stored = {k.removeprefix("state/"): v for k, v in golden.items() if k.startswith("state/")}
    return {k: torch.from_numpy(v).view(torch.bfloat16).float() for k, v in stored.items()}


def backbone(film_dim: int | None = LLM_DIM) -> VisionBackbone:
    sizes = {"image_size": 28, "embed_dim": 8, "depth": 3, "num_heads": 2}
    towers = [replace(KNOWN_TOWERS[name], **sizes) for name in TOWERS]
    return VisionBackbone((towers[0], towers[1]), film_dim)


def test_features_of_two_images_a_row_equal_the_originals(golden, state):
    ours = backbone()
    ours.load_state_dict(fold_film_state(state))
    pixels, language = torch.from_numpy(golden["pixels"]), torch.from_numpy(golden["language"])
    exact = exactly(ours, lambda towers: towers(pixels.double(), language.double()))
    FloatJudge.of(exact, ours(pixels, language)).check(torch.from_numpy(golden["features"]))


def test_the_fold_needs_the_trainers_alpha(golden, state):
    assert any("patch_embed.proj.lora_A" in name for name in state)  # the convolution is adapted, too
    ours = backbone()
    ours.load_state_dict(fold_film_state(state, alpha=20))
    features = ours(torch.from_numpy(golden["pixels"]), torch.from_numpy(golden["language"]))
    assert np.abs(features.detach().numpy() - golden["features"]).max() > 1e-2


def test_a_state_without_adapters_is_only_renamed():
    names = list(backbone().state_dict())
    film = (".scale.", ".shift.")
    theirs = {n: n if any(f in n for f in film) else re.sub(r"(blocks\.\d)", r"\1.block", n) for n in names}
    state = {f"vision_backbone.{theirs[n]}": torch.tensor(float(i)) for i, n in enumerate(names)}
    assert fold_film_state(state) == {n: float(i) for i, n in enumerate(names)}


def film_model() -> OpenVLAModel:
    config = tiny_config("parallel", use_proprio=False).with_decoder(use_film=True)
    torch.manual_seed(0)
    return OpenVLAModel(config)


def test_film_averages_the_prompt_and_the_stop_token(golden, monkeypatch):
    model = film_model()
    table = torch.from_numpy(golden["embedding"])
    monkeypatch.setattr(model, "embed_tokens", lambda ids: table[ids])
    text = model.embed_tokens(torch.from_numpy(golden["input_ids"])[None])
    ours = decoders._mean_embedding(model, text, None)
    np.testing.assert_allclose(ours[0].numpy(), golden["language_mean"], atol=1e-6)


def test_each_row_of_a_ragged_batch_gets_its_own_prompt():
    model = film_model()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 1, 3, 56, 56), generator=generator).to(torch.uint8)
    short, long = [1, 300, 301], [1, 300, 302, 303, 304, 305]
    ids = torch.tensor([[*short, 3, 3, 3], long])
    batch = PolicyInput(ids, ids != 3, pixels, None)
    decoder = decoders.ParallelDecoder(model.config.num_action_tokens)

    def states(reader: OpenVLAModel, inputs: PolicyInput) -> torch.Tensor:
        return decoder.states(reader, decoders.embed_prefix(reader, inputs, None), inputs.input_ids)

    together = states(model, batch)
    for row, prompt in enumerate((short, long)):
        alone = torch.tensor([prompt])
        one = PolicyInput(alone, torch.ones_like(alone, dtype=torch.bool), pixels[row : row + 1], None)
        exact = exactly(model, lambda reader, one=one: states(reader, one))
        FloatJudge.of(exact, states(model, one)).check(together[row : row + 1])


def test_the_prompt_matters_and_is_required():
    model = film_model()
    pixels = torch.zeros(1, 1, 3, 56, 56, dtype=torch.uint8)
    one, other = (model.embed_images(pixels, torch.full((1, model.hidden_size), v)) for v in (0.1, 0.2))
    assert (one - other).abs().max() > 1e-3
    with pytest.raises(ValueError, match="needs the mean embedding"):
        model.embed_images(pixels)
    with pytest.raises(ValueError, match="use decoder 'parallel'"):
        model.config.with_decoder("autoregressive")
