"""An engine whose process dies in the middle of a weight sync: after the first bucket of a version."""

import os
import signal
from pathlib import Path

import torch

from vlarl.config.schema import Config
from vlarl.distributed.engines import build_torch_engine
from vlarl.rollout.engines.replica import ReplicaEngine

FATAL_VERSION = 2
MARK = "died-in-a-sync"  # a file in run.root: it dies once


class LostEngine(ReplicaEngine):
    """Has loaded a part of the weights when it dies."""

    def __init__(self, config: Config) -> None:
        built = build_torch_engine(config, on_gpu=False)
        super().__init__(built.policy, torch.device("cpu"), config.rollout.batch_size)
        self.mark = Path(config.run.root) / MARK

    def update_weights(self, message):
        super().update_weights(message)
        if self._syncing == FATAL_VERSION and self._awaited and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def build(config: Config, on_gpu: bool) -> LostEngine:
    """In place of `build_torch_engine`."""
    assert not on_gpu
    return LostEngine(config)
