"""Registers vlarl's weight transfer and adapters with vLLM in every process that it starts.

An entry point of `vllm.general_plugins`. Names only: nothing heavy is imported before vLLM needs it.
"""

from __future__ import annotations

BYTES_BACKEND = "vlarl_bytes"
ADAPTER_FORMAT = "vlarl_adapters"


def register() -> None:
    """Register the weight transfer and the loader of models with adapters; once is enough."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    if BYTES_BACKEND in WeightTransferEngineFactory._registry:
        return
    from vlarl.weights.vllm_adapters import AdapterLoader

    register_model_loader(ADAPTER_FORMAT)(AdapterLoader)
    WeightTransferEngineFactory.register_engine(
        BYTES_BACKEND, "vlarl.weights.vllm_transfer", "BytesWeightTransferEngine"
    )
