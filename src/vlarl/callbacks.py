"""The user's functions that a run calls: once per iteration, and once per episode.

    loop ──► Session.record_rollout, record_evaluation ──► on_episode(EpisodeRecord), for each episode
         └─► Session.end_iteration ──────────────────────► on_iteration(IterationRecord), after its row is written

They are called in the process and in the thread of the loop, which waits for them. Their return value is ignored. An
exception ends the run like any other failure: the last complete iteration is saved, and the error names the callback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlarl.errors import VlarlError, raised_in
from vlarl.interrupt import Interrupted
from vlarl.types import EpisodeResult, Trajectory


@dataclass(frozen=True)
class IterationRecord:
    """One row of metrics.jsonl: `IterationRecord(3, {"rollout/success_rate": 0.25, ...}, Path("runs/first"))`."""

    iteration: int  # 0: the evaluation before the first update
    metrics: dict[str, float]
    run_dir: Path


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode, after it was scored. `trajectory` holds its decisions; it is None for evaluated episodes."""

    iteration: int
    phase: Literal["rollout", "eval"]
    result: EpisodeResult
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class Callbacks:
    """The functions that a run calls; None: no call."""

    on_iteration: Callable[[IterationRecord], object] | None = None
    on_episode: Callable[[EpisodeRecord], object] | None = None

    def iteration(self, record: IterationRecord) -> None:
        """Report a finished iteration."""
        _call("on_iteration", self.on_iteration, record)

    def episode(self, record: EpisodeRecord) -> None:
        """Report a finished episode."""
        _call("on_episode", self.on_episode, record)


def _call(argument: str, function: Callable[..., object] | None, record: IterationRecord | EpisodeRecord) -> None:
    if function is None:
        return
    try:
        function(record)
    except (Interrupted, KeyboardInterrupt):
        raise  # Ctrl-C, also in a callback that trains or evaluates by itself
    except BaseException as error:  # the user's code may raise anything
        raise VlarlError(f"the callback {argument} ({_name(function)}) raised {_described(error)}.") from error


def _name(function: Any) -> str:
    known = function if hasattr(function, "__qualname__") else type(function)
    return f"{known.__module__}.{known.__qualname__}"


def _described(error: BaseException) -> str:
    """`ValueError: too low (my_callbacks.py, line 12)`."""
    frames = raised_in(error)
    return f"{type(error).__name__}: {error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
