"""A learner's rank whose process dies in the middle of an update: after its first optimizer step."""

import os
import signal
from pathlib import Path

from vlarl.distributed.learners import Rank

FATAL_ITERATION = 4
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
