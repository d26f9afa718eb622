"""Episodes of a collector in the order of their tasks."""

from collections.abc import Sequence
from typing import Any

from vlarl.decisions import Sampling
from vlarl.rollout.collector import Collector, Episode
from vlarl.types import Task


def collected(collector: Collector, tasks: Sequence[Task], temperature: float, **options: Any) -> list[Episode]:
    ended = dict(collector.episodes(tasks, Sampling(temperature), **options))
    return [ended[index] for index in range(len(tasks))]
