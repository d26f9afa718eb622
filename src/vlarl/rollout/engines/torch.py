"""The engine that needs only torch: batched, without gradients, on the learner's own weights.

A pass that runs out of memory is tried again without the recordings of earlier ones (cuda_graphs.py), then with half of
its decisions; a decision follows from its own seed, so it is the same in any batch. Passes stay that small.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.devices import free_cached_memory, is_out_of_memory, out_of_memory
from vlarl.policies.base import Policy
from vlarl.recording import graph_recorder
from vlarl.rollout.engines.base import not_finite, refuse_sampling
from vlarl.rollout.engines.cuda_graphs import Recordings, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassCounts:
    """What an engine's passes have taken so far."""

    recording_s: float = 0.0  # seconds in which passes were recorded
    oom_retries: int = 0  # passes that were tried again after they ran out of memory

    def since(self, earlier: PassCounts) -> dict[str, float]:
        """As metrics of the time since then; what never happens has none."""
        spent, retries = self.recording_s - earlier.recording_s, self.oom_retries - earlier.oom_retries
        found = {"time/recording": spent} if spent else {}
        return found | ({"rollout/oom_retries": float(retries)} if retries else {})


class TorchEngine:
    """Runs the policy module itself. When that is the learner's own module, a weight sync copies nothing."""

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        batch_size: int | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """`batch_size` limits the rows of one pass, None runs all at once; `cuda_graphs` replays passes on a GPU."""
        self.policy = policy
        self.device = device
        self.batch_size = batch_size
        self.version = 0
        self._oom_retries = 0
        self._recordings: Recordings | None = None  # None: passes are not recorded
        if cuda_graphs and device.type == "cuda":
            if policy.recordable:
                self._recordings = Recordings(graph_recorder(device))
            else:
                policy.record_passes()

    @property
    def counts(self) -> PassCounts:
        """What passes have taken so far."""
        return PassCounts(0.0 if self._recordings is None else self._recordings.seconds, self._oom_retries)

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        refuse_sampling(sampling, self.policy.sampling_options)
        parts: list[Decisions] = []
        start = 0
        while start < len(inputs) or not parts:
            rows = slice(start, start + (self.batch_size or len(inputs)))
            part = self._tried(inputs.rows(rows), sampling, seeds[rows])
            if part is not None:
                parts.append(part)
                start = rows.stop
        decisions = Decisions.cat(parts)
        if not decisions.engine_logprobs[decisions.mask].isfinite().all():
            raise not_finite(self.version)
        return decisions.of_version(self.version)

    def _tried(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions | None:
        """The decisions of one pass; None if it ran out of memory and is worth another try."""
        try:
            return self._generate(inputs, sampling, seeds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        self._oom_retries += 1
        if not self.release_recordings():  # after the error, whose traceback holds tensors
            self._make_smaller(len(inputs), reason)
            free_cached_memory(self.device)
        return None

    def _make_smaller(self, rows: int, reason: str) -> None:
        """Limit passes to half of these rows: to a power of two, to which recorded ones are padded."""
        if rows == 1:
            raise out_of_memory("the decision for a single observation", reason)
        self.batch_size = 1 << (rows - 1).bit_length() - 1
        said = f"passes of {rows} decisions; from here on {self.batch_size}"
        log.warning("the rollout ran out of memory with %s. %s", said, reason.split("\n")[0])

    def release_recordings(self) -> bool:
        """Free the memory of recorded passes, which are recorded again when they are needed; whether there were any."""
        return self._recordings is not None and self._recordings.release()

    @torch.no_grad()
    def _generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        sample: Sample = partial(self.policy.sample, sampling=sampling)
        inputs, noise = inputs.to(self.device), self.policy.noise(seeds, sampling).to(self.device)
        if self._recordings is not None:
            return self._recordings.run(sample, sampling, inputs, noise)
        return sample(inputs, noise)

    def weights_changed(self, version: int) -> None:
        """Act with the policy's weights as they are now, which are of this version."""
        self.policy.weights_changed()
        self.version = version
