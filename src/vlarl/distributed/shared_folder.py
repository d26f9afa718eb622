"""The folder that workers of all machines write to, and the message where one of them does not see it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SharedFolder:
    """Whose folder it is, and how the user names it."""

    option: str
    owner: str
    content: str  # what workers write there

    def refusal(self, worker: str, path: Path) -> str:
        """Why a worker can't begin on this machine, which does not see the folder."""
        return (
            f"{self.option}: {worker} runs on {socket.gethostname()}, which does not see the {self.owner}'s folder "
            f"{path} as the driver's machine does. All machines write {self.content} there: set {self.option} to a "
            "folder that they all mount under the same path, such as one on NFS, or run on one machine."
        )


RUN_FOLDER = SharedFolder("run.root", "run", "checkpoints and logs")
EVALUATION_FOLDER = SharedFolder("--out", "evaluation", "logs")
