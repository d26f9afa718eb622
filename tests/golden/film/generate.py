"""Writes film.npz with the original FiLM wrapper of OpenVLA-OFT, which vlarl neither needs nor installs.

    pip install timm==0.9.16 peft==0.11.1 transformers==4.40.1
    python generate.py OPENVLA_OFT_CHECKOUT [FOLDER]     # beside this file unless a folder is named

Two towers at toy size get LoRA as the original trainer adds it (all-linear, rank 20, alpha 16) and are then wrapped:
`state/…` has the names of its `vision_backbone--N_checkpoint.pt`, bfloat16 as uint16. `features` are those of two images
a row; `language_mean` is what its predict_action lets FiLM average for the prompt `input_ids`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import timm
import torch
from peft import LoraConfig, get_peft_model
from timm.models.vision_transformer import LayerScale
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
SIZES = {"embed_dim": 8, "depth": 3, "num_heads": 2, "img_size": 28}
RANK, LLM_DIM, IMAGES, ROWS = 20, 24, 2, 2


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Backbone(nn.Module):
    """The part of the original's vision backbone that the wrapper uses."""

    def __init__(self) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (
            timm.create_model(name, pretrained=False, num_classes=0, **SIZES) for name in TOWERS
        )
        self.use_fused_vision_backbone = True
        for module in self.modules():
            if isinstance(module, LayerScale):
                module.scale_factor = nn.Parameter(module.gamma.clone())
                module.forward = lambda x, m=module: x * m.scale_factor
                del module.gamma

    def get_num_images_in_input(self) -> int:
        return IMAGES


class Toy(PreTrainedModel):
    """peft's all-linear wants a transformers model with a head."""

    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.vision_backbone = Backbone()
        self.lm_head = nn.Linear(4, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def averaged_by_predict_action(checkout: Path, embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    """The mean of what the original hands to FiLM."""
    for name in ("prismatic", "prismatic.training", "prismatic.vla", "prismatic.hf"):
        sys.modules[name] = ModuleType(name)
    sys.modules["prismatic.hf"].__path__ = []
    load(checkout / "prismatic/vla/constants.py", "prismatic.vla.constants")
    load(checkout / "prismatic/training/train_utils.py", "prismatic.training.train_utils")
    hf = checkout / "prismatic/extern/hf"
    load(hf / "configuration_prismatic.py", "prismatic.hf.configuration_prismatic")
    original = load(hf / "modeling_prismatic.py", "prismatic.hf.modeling_prismatic").OpenVLAForActionPrediction
    seen = []

    def capture(_pixels: torch.Tensor, language: torch.Tensor, _film: bool) -> torch.Tensor:
        seen.append(language)
        raise StopIteration

    parts = ("_prepare_input_for_action_prediction", "_prepare_labels_for_action_prediction", "_process_action_masks")
    model = SimpleNamespace(get_input_embeddings=lambda: embedding, _process_vision_features=capture)
    for part in parts:
        setattr(model, part, getattr(original, part).__get__(model))
    mask = torch.ones(1, ids.shape[1] + 1, dtype=torch.bool)
    try:
        original.predict_action(model, ids, pixel_values=None, attention_mask=mask, use_film=True)
    except StopIteration:
        return seen[0].mean(dim=1)[0]
    raise RuntimeError("the original never called the vision backbone")


@torch.no_grad()
def main(checkout: Path, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    film = load(checkout / "prismatic/models/film_vit_wrapper.py", "film_vit_wrapper")
    lora = LoraConfig(r=RANK, lora_alpha=min(RANK, 16), target_modules="all-linear", init_lora_weights="gaussian")
    vla = get_peft_model(Toy(), lora)
    vla.model.vision_backbone = film.FiLMedPrismaticVisionBackbone(vla.model.vision_backbone, LLM_DIM)
    backbone = vla.vision_backbone.eval()
    for name, parameter in sorted(backbone.named_parameters()):
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        std = 0.05 if "patch_embed" in name else 0.2
        parameter.copy_((centre + std * torch.randn(parameter.shape, generator=generator)).bfloat16())
    pixels = torch.randn(ROWS, 6 * IMAGES, SIZES["img_size"], SIZES["img_size"], generator=generator)
    language = torch.randn(ROWS, 5, LLM_DIM, generator=generator)
    state = {f"state/{k}": v.bfloat16().view(torch.uint16).numpy() for k, v in backbone.state_dict().items()}

    embedding = nn.Embedding(40, LLM_DIM)
    embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))
    large = nn.Embedding(32064, LLM_DIM)  # the original appends id 29871
    large.weight[:40] = embedding.weight
    large.weight[29871] = embedding.weight[39]
    ids = torch.tensor([[1, 5, 9, 17, 5, 22]])
    np.savez_compressed(
        folder / "film.npz",
        num_heads=np.array(SIZES["num_heads"]),
        pixels=pixels.numpy(),
        language=language.mean(dim=1).numpy(),
        features=backbone(pixels, language).numpy(),
        embedding=embedding.weight.numpy(),
        input_ids=np.array([*ids[0].tolist(), 39]),
        language_mean=averaged_by_predict_action(checkout, large, ids).numpy(),
        **state,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
