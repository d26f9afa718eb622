"""Learner ranks whose processes die: in an update, after its first optimizer step, or in a step of a supervised run."""

import os
import signal
from pathlib import Path

from vlarl.distributed.finetune import FinetuneRank
from vlarl.distributed.learners import Rank

FATAL_ITERATION = 4
FATAL_STEP = 5
MARK = "died-in-an-update"  # a file in run.root: it dies once


class LostRank(Rank):
    """Has changed its weights when it dies."""

    def updating(self, *arguments):
        mark, iteration = Path(self.config.run.root) / MARK, arguments[1]
        for step in super().updating(*arguments):
            if iteration == FATAL_ITERATION and not mark.exists():
                mark.write_text(repr(step))
                os.kill(os.getpid(), signal.SIGKILL)
            yield step


class LostFinetuneRank(FinetuneRank):
    """Rank 1 of a supervised run, which dies in a step, before the others can finish theirs."""

    def step(self):
        mark = Path(self.config.run.root) / MARK
        if self.rank == 1 and self._trainer.state.iteration == FATAL_STEP - 1 and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()
