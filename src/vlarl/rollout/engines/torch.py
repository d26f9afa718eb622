"""The engine that needs only torch: batched, without gradients, on the learner's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.policies.base import Policy
from vlarl.recording import Recorder, graph_recorder
from vlarl.rollout.engines.base import not_finite, refuse_sampling
from vlarl.rollout.engines.cuda_graphs import GraphedSampling, Sample


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
        self._graphs: dict[Sampling, GraphedSampling] = {}
        self._recorder: Recorder | None = None  # None: passes are not recorded
        if cuda_graphs and device.type == "cuda":
            if policy.recordable:
                self._recorder = graph_recorder(device)
            else:
                policy.record_passes()

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        refuse_sampling(sampling, self.policy.sampling_options)
        size = self.batch_size or len(inputs)
        parts = [
            self._generate(inputs.rows(slice(start, start + size)), sampling, seeds[start : start + size])
            for start in range(0, len(inputs), size)
        ]
        decisions = Decisions.cat(parts)
        if not decisions.engine_logprobs[decisions.mask].isfinite().all():
            raise not_finite(self.version)
        return decisions.of_version(self.version)

    @torch.no_grad()
    def _generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        sample: Sample = partial(self.policy.sample, sampling=sampling)
        if self._recorder is not None:
            sample = self._graphs.setdefault(sampling, GraphedSampling(sample, self._recorder))
        return sample(inputs.to(self.device), self.policy.noise(seeds, sampling).to(self.device))

    def weights_changed(self, version: int) -> None:
        """Act with the policy's weights as they are now, which are of this version."""
        self.policy.weights_changed()
        self.version = version
