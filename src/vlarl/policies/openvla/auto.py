"""OpenVLA's configuration for transformers' AutoConfig, and which class goes into which table of transformers.

The model and the processor are in `hf.py`, which loads PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from transformers.configuration_utils import PretrainedConfig

MODEL_TYPE = "openvla"


class OpenVLAConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """A checkpoint's config.json with transformers' names; the language model's part is a configuration of its own."""

    model_type = MODEL_TYPE

    def __init__(self, text_config: dict[str, Any] | PretrainedConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(text_config, PretrainedConfig):
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            given = {"model_type": "llama", **(text_config or {})}
            text_config = CONFIG_MAPPING[given["model_type"]](**given)
        self.text_config = text_config
        super().__init__(**kwargs)


def register(module: ModuleType) -> None:
    """Register OpenVLA with the Auto classes of a module, unless transformers has a model of that type itself."""
    known: Any = module
    if module.__name__.endswith("configuration_auto"):
        if MODEL_TYPE not in known.CONFIG_MAPPING_NAMES:
            known.AutoConfig.register(MODEL_TYPE, OpenVLAConfig)
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if CONFIG_MAPPING[MODEL_TYPE] is not OpenVLAConfig:
        return
    from vlarl.policies.openvla import hf

    if module.__name__.endswith("processing_auto"):
        known.AutoProcessor.register(OpenVLAConfig, hf.PrismaticProcessor)
        return
    for name in ("AutoModelForImageTextToText", "AutoModelForVision2Seq"):  # the second one: before transformers 5
        if hasattr(known, name):
            getattr(known, name).register(OpenVLAConfig, hf.OpenVLAForActionPrediction)
