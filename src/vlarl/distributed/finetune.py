"""Supervised training on ranks: an actor for each rank, behind the interface of one trainer.

    RankTrainers ── step(), validate(), save(…) ──► FinetuneRank 0, FinetuneRank 1 …   all of them, in the same order
                 ◄── rank 0's result and counters ─

Each rank has a part of every batch, its own copy of the demonstrations, and a part of the weights where they are
sharded. Recorded episodes are read by every rank. Experts play once, in the driver, which puts what they did into the
object store; the ranks copy it out, and it is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from vlarl.config.finetune import FinetuneConfig, FinetuneOptimConfig
from vlarl.data.demos import Note, collect_demos
from vlarl.data.finetune import start
from vlarl.data.finetune_trainer import Collected, DemoTrainer, TrainedOn
from vlarl.distributed.actor import Worker, put
from vlarl.distributed.rank_group import RankGroup, RankProcess
from vlarl.training.ranks import Ranks
from vlarl.training.sft import ImitationState

Reply = tuple[Any, ImitationState]
"""The result of a call, and the counters after it."""


class FinetuneRank(RankProcess):
    """One of the processes that train together; built and called in the worker's process."""

    def __init__(self, config: FinetuneConfig, world_size: int, on_gpu: bool, rank: int) -> None:
        super().__init__(config.distributed, world_size, on_gpu, rank)
        self.config = config

    def join(self, address: str, port: int) -> None:
        """Join the other ranks, and load the policy."""
        self._ranks: Ranks = self.join_others(address, port, self.config.distributed.timeout_s)
        torch.manual_seed(self.config.run.seed)
        sharded = self.sharding.mode != "none"
        self._policy, self._sources = start(self.config, torch.device("cpu") if sharded else self.device, sharded)

    def open(self, played: Collected | None, folder: Path) -> tuple[TrainedOn, list[str], ImitationState]:
        """Read the demonstrations, unless experts have played them, and build the trainer, with checkpoints in this
        folder; returns what it is trained on, lines for the user, and the counters."""
        lines: list[str] = []
        collected = Collected(*collect_demos(self._sources, lines.append)) if played is None else deepcopy(played)
        self._trainer = DemoTrainer(
            self.config,
            self._policy,
            self._sources,
            collected,
            self.device,
            folder,
            lines.append,
            self._ranks,
            self.sharding,
        )
        return self._trainer.trained_on, lines, self._trainer.state

    def restore(self, checkpoint: Path) -> Reply:
        """Resume from a checkpoint."""
        self._trainer.restore(checkpoint)
        return None, self._trainer.state

    def step(self) -> Reply:
        """The next optimizer step."""
        return self._trainer.step(), self._trainer.state

    def validate(self) -> Reply:
        """Measure the policy on held-out episodes."""
        return self._trainer.validate(), self._trainer.state

    def save(self, name: str) -> Reply:
        """Write a checkpoint."""
        self._trainer.save(name)
        return None, self._trainer.state

    def finish(self) -> Reply:
        """Write the final policy."""
        self._trainer.finish()
        return None, self._trainer.state


class RankTrainers(RankGroup):
    """All ranks as one trainer."""

    def __init__(
        self, workers: Sequence[Worker], config: FinetuneConfig, played: Collected | None, folder: Path, note: Note
    ) -> None:
        """`played` is what experts have played, if they have; checkpoints are kept in `folder`; `note` shows a line."""
        super().__init__(workers, config.distributed.start_timeout_s)
        self.optim: FinetuneOptimConfig = config.optim
        self.agreement: Mapping[str, float] = {}  # of reward models, which no ranks train
        self.join()
        given = None if played is None else put(played)
        self.trained_on: TrainedOn
        self.state: ImitationState
        self.trained_on, lines, self.state = self.call_all("open", given, folder.absolute())
        for line in lines:
            note(line)

    def restore(self, checkpoint: Path) -> None:
        """Bring all ranks to the state of a checkpoint."""
        self._call("restore", checkpoint.absolute())

    def step(self) -> dict[str, float] | None:
        """The next optimizer step; the row of metrics that is due after it."""
        row: dict[str, float] | None = self._call("step")
        return row

    def validate(self) -> dict[str, float] | None:
        """Measure the policy on held-out episodes; None where there are none."""
        row: dict[str, float] | None = self._call("validate")
        return row

    def save(self, name: str) -> None:
        """Write a checkpoint that training can resume from."""
        self._call("save", name)

    def finish(self) -> None:
        """Write the final policy."""
        self._call("finish")

    def _call(self, method: str, *arguments: Any) -> Any:
        result, self.state = self.call_all(method, *arguments)
        return result
