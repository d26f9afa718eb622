"""The published vision backbones by their ids: sizes, and what is refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from fakes.float_error import FloatJudge, exactly
from peft import LoraConfig, inject_adapter_in_model

from vlarl.policies.openvla.config import parse_config, read_config
from vlarl.policies.openvla.towers import KNOWN_TOWERS, VISION_BACKBONES
from vlarl.policies.openvla.vision import VisionBackbone
from vlarl.policies.tiny import tiny_config

# Parameters, tensors and patches of an image, as timm 0.9.16 builds them with num_classes=0.
TIMM = {
    "siglip-vit-b16-224px": (92_884_224, 162, 196),
    "siglip-vit-b16-256px": (92_930_304, 162, 256),
    "siglip-vit-b16-384px": (93_176_064, 162, 576),
    "siglip-vit-so400m": (427_680_704, 342, 256),
    "siglip-vit-so400m-384px": (428_225_600, 342, 729),
    "dinov2-vit-l": (303_230_976, 343, 256),
    "clip-vit-b": (85_799_424, 151, 196),
    "clip-vit-l": (303_179_776, 295, 256),
    "clip-vit-l-336px": (303_507_456, 295, 576),
    "in1k-vit-l": (303_301_632, 294, 196),
    "dinoclip-vit-l-336px": (607_066_112, 638, 576),
    "dinosiglip-vit-so-224px": (730_911_680, 685, 256),
    "dinosiglip-vit-so-384px": (731_940_928, 685, 729),
}


def bare(backbone: str, **fields):
    """A config.json with nothing but ids."""
    return {"vision_backbone_id": backbone, "text_config": {"vocab_size": 32064}, **fields}


def test_every_published_id_is_known():
    assert TIMM.keys() == VISION_BACKBONES.keys()


@pytest.mark.parametrize("backbone", TIMM)
def test_sizes_follow_from_the_backbones_id(backbone):
    config = parse_config(bare(backbone))
    with torch.device("meta"):
        model = VisionBackbone(config.towers)
    count = sum(p.numel() for p in model.parameters())
    assert (count, len(model.state_dict()), model.num_patches) == TIMM[backbone]
    listed = {
        "timm_model_ids": [t.timm_id for t in config.towers],
        "image_sizes": [t.image_size for t in config.towers],
        "timm_override_act_layers": ["quick_gelu" if "clip_" in t.timm_id else None for t in config.towers],
        "use_fused_vision_backbone": backbone.startswith("dino") and "v2" not in backbone,
    }
    assert parse_config(bare("another", **listed)).towers == config.towers


def test_the_list_of_towers_wins_over_the_id():
    towers = {"timm_model_ids": ["vit_large_patch14_clip_224.openai"], "image_sizes": [98]}
    (tower,) = parse_config(bare("siglip-vit-so400m", **towers)).towers
    assert (tower.image_size, tower.num_patches, tower.activation) == (98, 49, "quick_gelu")
    (plain,) = parse_config(bare("clip-vit-l", timm_override_act_layers=[None])).towers
    assert plain.activation == "gelu"


def test_pixel_statistics_of_the_preprocessor_win(tmp_path):
    raw = bare("clip-vit-l")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).towers == parse_config(raw).towers
    content = {"means": [[0.1, 0.2, 0.3]], "stds": [[0.4, 0.5, 0.6]]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    (tower,) = read_config(tmp_path).towers
    assert (tower.mean, tower.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"means": [[0.1]], "stds": [[0.4]]}))
    with pytest.raises(ValueError, match="preprocessor_config.json: means and stds must be three values"):
        read_config(tmp_path)


def test_image_tokens_are_derived():
    config = tiny_config("parallel", num_images=2, use_proprio=True)
    assert config.num_image_tokens == 2 * 16 + 1
    assert config.with_decoder(num_images=1, use_proprio=False).num_image_tokens == 16
    large = parse_config(bare("dinosiglip-vit-so-384px"))
    assert (large.num_image_tokens, large.with_decoder("parallel", num_images=2).num_image_tokens) == (729, 1458)


def test_what_does_not_fit_into_the_language_model_is_refused():
    config = parse_config(bare("dinosiglip-vit-so-384px"))
    with pytest.raises(ValueError, match=r"3 images of 729 tokens and 56 action tokens .* 2276 .* has 2048"):
        config.with_decoder("parallel", num_images=3)
    raw = bare("dinosiglip-vit-so-384px")
    raw["text_config"]["max_position_embeddings"] = 4096
    assert parse_config(raw).with_decoder("parallel", num_images=3).num_images == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_backbone_id": "resnet"}, "lacks timm_model_ids"),
        ({"timm_model_ids": ["vit_tiny"], "image_sizes": [224]}, "'vit_tiny' is not supported; known are"),
        ({"timm_model_ids": list(KNOWN_TOWERS)[:1]}, "lacks image_sizes"),
        ({"timm_override_act_layers": ["relu"]}, "'relu' is not supported; known are gelu, quick_gelu"),
        ({"timm_override_act_layers": [None, None]}, "2 timm_override_act_layers, but .* requires 1"),
        ({"image_sizes": [13]}, "smaller than a patch of 14"),
        ({"use_fused_vision_backbone": True}, "requires 2 of each"),
        ({"vision_backbone_id": "dinosiglip-vit-so-224px", "image_sizes": [224, 384]}, "the sizes must be equal"),
    ],
)
def test_a_wrong_backbone_is_told(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_config({**bare("siglip-vit-so400m"), **fields})


def test_an_adapter_on_the_convolution_of_the_patches_counts():
    """The original's adapters have one there, since they go by the ends of names."""
    tower = replace(KNOWN_TOWERS["vit_base_patch16_siglip_224"], image_size=36, embed_dim=8, depth=2, num_heads=2)
    torch.manual_seed(0)
    plain = VisionBackbone((tower,))
    adapted = copy.deepcopy(plain)
    pixels = torch.randn(2, 3, 36, 36)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=2, target_modules=["patch_embed.proj"]), adapted)
    adapter = adapted.featurizer.patch_embed.proj
    with torch.no_grad():
        adapter.lora_B["default"].weight.normal_()
        change = adapter.lora_B["default"].weight.flatten(1) @ adapter.lora_A["default"].weight.flatten(1)
        plain.featurizer.patch_embed.proj.weight += 0.5 * change.view(8, 3, 16, 16)
    FloatJudge.of(exactly(adapted, lambda towers: towers(pixels.double())), adapted(pixels)).check(plain(pixels))
