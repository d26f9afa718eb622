"""Registers vlarl's OpenVLA with vLLM in every process that it starts (entry point `vllm.general_plugins`).

Names only: nothing heavy is imported before vLLM needs it.
"""

from __future__ import annotations

ARCHITECTURE = "VlarlOpenVLAForActionPrediction"
CONFIG_FORMAT = "vlarl"


def register() -> None:
    """Register the model class and the reader of its config.json; once is enough."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import register_config_parser

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    from vlarl.policies.openvla.vllm.config import OpenVLAConfigParser

    ModelRegistry.register_model(ARCHITECTURE, "vlarl.policies.openvla.vllm.model:VlarlOpenVLA")
    register_config_parser(CONFIG_FORMAT)(OpenVLAConfigParser)
