"""Metrics of an iteration: collected with their true weights, reduced once, sent to every sink as one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from vlarl.observability.samples import Sample
from vlarl.observability.video import Video


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take one row."""
        ...

    def show(self, iteration: int, videos: Sequence[Video]) -> None:
        """Take videos of evaluated episodes."""
        ...

    def show_samples(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Take samples of one phase of an iteration."""
        ...

    def close(self) -> None:
        """Write what is pending and release all resources."""
        ...


class WeightedMeans:
    """Means of sums with weights (tokens, decisions), so that minibatches of unequal size count as they should."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def add(self, name: str, total: float, weight: float) -> None:
        """Add a sum over `weight` items; the mean is the sum of totals over the sum of weights."""
        old_total, old_weight = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (old_total + float(total), old_weight + float(weight))

    def max(self, name: str, value: float) -> None:
        """Keep the largest value; a NaN is kept, since it must be seen."""
        value, old = float(value), self._maxima.get(name)
        if old is None or value != value or value > old:
            self._maxima[name] = value

    def last(self, name: str, value: float) -> None:
        """Keep the newest value."""
        self._last[name] = float(value)

    def reduce(self) -> dict[str, float]:
        """The reduced metrics; a mean over nothing is left out."""
        means = {name: total / weight for name, (total, weight) in self._totals.items() if weight}
        return means | self._maxima | self._last


class MetricLogger:
    """Sends each row to all sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one iteration."""
        row = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(iteration, row)

    def show(self, iteration: int, videos: Sequence[Video]) -> None:
        """Send videos of an evaluation, if there are any."""
        for sink in self._sinks if videos else ():
            sink.show(iteration, videos)

    def show_samples(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Send samples of one phase of an iteration, if there are any."""
        for sink in self._sinks if samples else ():
            sink.show_samples(iteration, samples)

    def close(self) -> None:
        """Close every sink, even when closing one of them fails."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
