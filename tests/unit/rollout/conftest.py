"""Episodes of which only the outcome matters."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from vlarl.types import Task, Trajectory


@pytest.fixture
def episodes(trajectory) -> Callable[..., list[Trajectory]]:
    """episodes(task_id, outcomes, group=…, status=…): one episode for each outcome, with reward 1 for success."""

    def make(task_id: int, outcomes: Sequence[bool], group: int = 0, status: str = "ok") -> list[Trajectory]:
        return [
            replace(
                trajectory([[0.0], [float(success)]], success=success, terminated=success),
                task=Task("suite", task_id, 3, seed=member, group=group, member=member),
                status=status,
            )
            for member, success in enumerate(outcomes)
        ]

    return make
