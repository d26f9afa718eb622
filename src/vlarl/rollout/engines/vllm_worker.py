"""What vlarl adds to vLLM's workers, in the processes that run the model."""

from __future__ import annotations

from typing import Any, cast

import torch

from vlarl.weights.nccl_library import require_nccl
from vlarl.weights.vllm_adapters import AdapterWorker


class EngineWorker(AdapterWorker):
    """Methods for vLLM's workers, called by `collective_rpc`."""

    def set_temperature(self, temperature: float) -> None:
        """Divide all logits by the temperature from now on, in float32, before vLLM scores and samples tokens."""
        model = cast(Any, self).get_model()
        compute = type(model).compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute(model, *args, **kwargs)
            return None if logits is None else logits.float() / temperature  # None: another worker gathers them

        model.compute_logits = divided

    def require_nccl(self) -> None:
        """VlarlError where weights that are sent by nccl would never arrive."""
        require_nccl()
