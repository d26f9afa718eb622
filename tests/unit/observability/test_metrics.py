import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from vlarl.observability.metrics import MetricLogger, WeightedMeans
from vlarl.observability.sinks import JsonlSink


class ListSink:
    def __init__(self, fails_to_close: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._fails_to_close = fails_to_close

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((iteration, dict(metrics)))

    def close(self) -> None:
        self.closed = True
        if self._fails_to_close:
            raise RuntimeError("no")


def test_means_weigh_by_tokens_not_by_minibatches() -> None:
    means = WeightedMeans()
    means.add("entropy", total=30.0, weight=10)  # mean 3 over 10 tokens
    means.add("entropy", total=1.0, weight=1)  # mean 1 over 1 token
    means.max("ratio_max", 1.5)
    means.max("ratio_max", 1.2)
    means.last("lr", 1e-3)
    means.last("lr", 1e-4)
    means.add("nothing", 0.0, 0)
    assert means.reduce() == {"entropy": 31 / 11, "ratio_max": 1.5, "lr": 1e-4}


def test_a_maximum_shows_that_something_was_not_a_number() -> None:
    means = WeightedMeans()
    for value in (1.0, math.nan, 2.0):
        means.max("ratio_max", value)
    assert math.isnan(means.reduce()["ratio_max"])


def test_a_row_reaches_every_sink_and_all_are_closed() -> None:
    first, second = ListSink(fails_to_close=True), ListSink()
    logger = MetricLogger([first, second])
    logger.log(3, {"a": 1})
    with pytest.raises(RuntimeError):
        logger.close()
    assert first.rows == second.rows == [(3, {"a": 1.0})]
    assert first.closed and second.closed


def test_not_a_number_is_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricLogger([JsonlSink(path)]) as logger:
        logger.log(1, {"train/grad_norm": math.nan, "train/ratio_max": math.inf, "train/lr": 0.5})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["train/grad_norm"] is None and row["train/ratio_max"] is None and row["train/lr"] == 0.5
