"""The engine that needs only torch: batched, without gradients, on the learner's own weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vlarl.policies.base import Policy
from vlarl.policies.distribution import greedy, sample, token_logprobs
from vlarl.rollout.engines.base import not_finite
from vlarl.rollout.engines.cuda_graphs import Decode, GraphedDecoding
from vlarl.types import ActionTokens, PolicyInput


class TorchEngine:
    """Runs the policy module itself. When that is the learner's own module, a weight sync copies nothing."""

    def __init__(
        self, policy: Policy, device: torch.device, batch_size: int | None = None, cuda_graphs: bool = True
    ) -> None:
        """`batch_size` limits the rows of one pass, None runs all at once; `cuda_graphs` replays passes on a GPU."""
        self.policy = policy
        self.device = device
        self.batch_size = batch_size
        self.version = 0
        self._graphs: dict[float, GraphedDecoding] = {}  # by temperature
        self._pool: Any = None  # None: passes are not recorded
        if cuda_graphs and device.type == "cuda" and policy.recordable:
            self._pool = torch.cuda.graph_pool_handle()

    def generate(self, inputs: PolicyInput, temperature: float, seeds: Sequence[int]) -> ActionTokens:
        """Sample action tokens, each row from its own seed whatever else is in the batch; temperature 0 is greedy."""
        size = self.batch_size or len(inputs)
        parts = [
            self._generate(inputs.rows(slice(start, start + size)), temperature, seeds[start : start + size])
            for start in range(0, len(inputs), size)
        ]
        ids, logprobs = (torch.cat(columns) for columns in zip(*parts, strict=True))
        if not logprobs.isfinite().all():
            raise not_finite(self.version)
        return ActionTokens(ids, logprobs, self.version)

    @torch.no_grad()
    def _generate(
        self, inputs: PolicyInput, temperature: float, seeds: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = self.policy.chunk_length * self.policy.action_dim
        uniforms = torch.from_numpy(
            np.stack([np.random.default_rng(seed).random(num_tokens, dtype=np.float32) for seed in seeds])
        )
        decode: Decode = partial(self._decode, temperature)
        if self._pool is not None:
            decode = self._graphs.setdefault(temperature, GraphedDecoding(decode, self._pool))
        return decode(inputs.to(self.device), uniforms.to(self.device))

    def _decode(
        self, temperature: float, inputs: PolicyInput, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and their log-probs; a recorded pass runs this once."""

        def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
            if temperature == 0:
                return greedy(logits)
            return sample(logits, temperature, uniforms[:, first : first + logits.shape[1]])

        ids, logits = self.policy.decode(inputs, choose)
        # Greedy actions are scored at temperature 1: at 0 every log-prob would be zero and say nothing.
        return ids, token_logprobs(logits, ids - self.policy.codec.first_id, temperature or 1.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over the learner's weights as `version`; tensors that the engine shares with it are not copied."""
        own = dict(self.policy.named_parameters())
        for name, tensor in weights:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)
        self.policy.weights_changed()
        self.version = version
