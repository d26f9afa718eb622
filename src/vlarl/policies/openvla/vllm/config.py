"""An OpenVLA checkpoint's config.json as vLLM reads it: ours, since vLLM's own supports only one size of Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vlarl.policies.openvla.config import OpenVLAConfig, language_config, read_config
from vlarl.policies.openvla.vllm.plugin import ARCHITECTURE


class VlarlOpenVLAConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The fields that vLLM requires of a configuration; everything else is read from the checkpoint folder."""

    model_type = "vlarl_openvla"

    def __init__(
        self,
        text_config: PretrainedConfig | None = None,
        num_images: int | None = None,
        use_proprio: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.text_config = text_config if text_config is not None else PretrainedConfig()
        self.num_images = num_images  # None: what the folder says
        self.use_proprio = use_proprio
        super().__init__(**kwargs)


class OpenVLAConfigParser(ConfigParserBase):  # type: ignore[misc]
    """`config_format="vlarl"`."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """Read the folder's config.json; the language model may be of any kind that both vlarl and vLLM support."""
        del trust_remote_code, args, kwargs
        config = read_config(Path(model))
        text = language_config(config.text)
        hf_config = VlarlOpenVLAConfig(text, architectures=[ARCHITECTURE])
        return hf_config.to_dict(), hf_config


def checkpoint_config(model_config: Any) -> OpenVLAConfig:
    """The checkpoint's configuration, with the engine's own choices (`hf_overrides`) applied."""
    hf_config = model_config.hf_config
    config = read_config(Path(model_config.model))
    return config.with_decoder("autoregressive", 1, hf_config.num_images, hf_config.use_proprio)
