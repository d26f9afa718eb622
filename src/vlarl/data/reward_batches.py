"""Batches of labelled samples for reward models, and how a model agrees with the held-out ones."""

from __future__ import annotations

import numpy as np
import torch

from vlarl.config.finetune import FinetuneOptimConfig
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.reward_samples import Samples, rows_of
from vlarl.rewards.preferences import Judged
from vlarl.rewards.reward_model import RewardModel
from vlarl.training.sft import DemoBatch

MAX_KEPT_BYTES = 4 * 2**30  # of encoded samples in memory; the others are encoded each time


class RewardBatches:
    """Samples of a run, by their indices; each is encoded once, as long as memory for it is left."""

    def __init__(
        self,
        samples: Samples,
        model: RewardModel,
        device: torch.device,
        sampler: MixtureSampler,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._samples, self._model, self._device, self._sampler = samples, model, device, sampler
        self._kept: dict[int, Judged] = {}
        self._bytes_left = max_kept_bytes

    def batch(self, first: int, size: int) -> DemoBatch:
        """Samples `first` … `first + size - 1` of the run."""
        _, indices = self._sampler.samples(first, size)
        parts = [self._row(int(index)) for index in indices]
        return batch_of(type(parts[0]).cat(parts).to(self._device))

    def _row(self, index: int) -> Judged:
        row = self._kept.get(index)
        if row is None:
            row = self._samples.row(index, self._model)
            size = sum(tensor.nbytes for tensor in row.tensors())
            if size <= self._bytes_left:
                self._bytes_left -= size
                self._kept[index] = row
        return row


def batch_of(rows: Judged) -> DemoBatch:
    """Rows as a batch of supervised training, without frames: pixels are among the rows."""
    return DemoBatch(rows, torch.empty(len(rows), 0, dtype=torch.uint8, device=rows.tensors()[0].device))


class RewardValidation:
    """Measures a reward model on held-out samples."""

    watched = "val/loss"

    def __init__(self, model: RewardModel, samples: Samples, count: int, optim: FinetuneOptimConfig) -> None:
        """`count`: about how many of the samples are scored."""
        self.policy, self._samples, self._optim = model, samples, optim
        self._indices = samples.measured(count)
        self._rows = rows_of(samples, self._indices, model)

    def __len__(self) -> int:
        return len(self._indices)

    def measure(self) -> dict[str, float]:
        """Loss and agreement, which the model's description then has, too."""
        model, optim = self.policy, self._optim
        model.eval()
        losses, values = [], []
        with torch.no_grad():
            for part in batch_of(self._rows).parts(optim.microbatch_size or optim.batch_size):
                assert isinstance(part.rows, Judged)
                here = part.rows.to(model.device)
                with torch.autocast(model.device.type, torch.bfloat16, enabled=optim.autocast == "bfloat16"):
                    value = here.values(model.score)
                losses.append(here.losses(value).cpu())
                values.append(value.cpu())
        model.train()
        found = self._samples.agreement(self._indices, torch.cat(values).numpy())
        row = {"loss": float(torch.cat(losses).double().mean()), **found}
        model.description.held_out = {name: float(np.round(value, 6)) for name, value in row.items()}
        return {f"val/{name}": value for name, value in row.items()}
