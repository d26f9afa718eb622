"""What was measured: rows, the table that is printed, and the JSON that is written."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlarl import __version__
from vlarl.bench.timing import GIB, Rates, Timing

PACKAGES = ("torch", "transformers", "peft")
HEADER = (
    *("what", "ms: median", "quartiles", "per s", "peak GiB"),
    *("peer ms", "quartiles", "peak GiB", "peer / vlarl", "floor ms", "floor / median", "MB sent", "agreement"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `agreement` says how far vlarl and the peer compute the same: see `rollout.py` and `update.py`.
    """

    what: str
    count: int  # decisions or samples in one repeat
    ours: Timing | None = None  # None: it failed, and `error` says how
    peer: Timing | None = None
    peer_name: str = ""
    floor_s: float | None = None  # of one repeat
    agreement: str = ""
    facts: dict[str, Any] | None = None  # whatever else was found out
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Seconds, bytes and ratios as values."""
        ours, peer = self.ours, self.peer
        return {
            "what": self.what,
            "count": self.count,
            "vlarl": None if ours is None else _timing_json(ours, self.count),
            "peer": None if peer is None else _timing_json(peer, self.count) | {"name": self.peer_name},
            "peer_over_vlarl": None if ours is None or peer is None else peer.median / ours.median,
            "floor_s": self.floor_s,
            "floor_over_median": None if ours is None or self.floor_s is None else self.floor_s / ours.median,
            "agreement": self.agreement or None,
            "facts": self.facts or {},
            "error": self.error or None,
        }

    def cells(self) -> tuple[str, ...]:
        """As text."""
        if self.ours is None:
            return (self.what, self.error)
        ours, peer = self.ours, self.peer
        floor = ("", "") if self.floor_s is None else (_ms(self.floor_s), f"{self.floor_s / ours.median:.2f}")
        ratio = "" if peer is None else f"{peer.median / ours.median:.2f}"
        sent = f"{self.facts['bytes'] / 1e6:.1f}" if self.facts and "bytes" in self.facts else ""
        theirs = ("", "", "") if peer is None else (_ms(peer.median), _quartiles(peer), _peak(peer))
        return (
            *(self.what, _ms(ours.median), _quartiles(ours), f"{self.count / ours.median:.1f}", _peak(ours)),
            *(*theirs, ratio, *floor, sent, self.agreement),
        )


@dataclass(frozen=True)
class Report:
    """What one command measured."""

    command: str
    settings: dict[str, Any]  # the options, and the model's sizes
    rates: Rates
    rows: Sequence[Row]
    notes: Sequence[str] = ()  # how a row was measured, for the reader of the table

    def to_json(self) -> dict[str, Any]:
        """As docs/performance.md describes it."""
        return {
            "command": self.command,
            "machine": machine(torch.device(self.settings["device"])),
            "settings": self.settings,
            "rates": {"flops_per_s": self.rates.flops_per_s, "bytes_per_s": self.rates.bytes_per_s},
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """The table, without columns that nothing is in."""
        rates = self.rates
        rows = [HEADER, *(row.cells() for row in self.rows)]
        used = [i for i in range(len(HEADER)) if i < 2 or any(len(r) > i and r[i] for r in rows[1:])]
        widths = [max(len(row[i]) if len(row) > i and len(row) > 2 else 0 for row in rows) for i in used]
        widths[0] = max(len(row[0]) for row in rows)
        table = []
        for row in rows:
            if len(row) == 2:
                table.append(f"{row[0]:<{widths[0]}}  {row[1]}")
                continue
            texts = [f"{row[i]:>{width}}" if i else f"{row[i]:<{width}}" for i, width in zip(used, widths, strict=True)]
            table.append("  ".join(texts).rstrip())
        measured = f"{rates.flops_per_s / 1e12:.3g} TFLOP/s, memory {rates.bytes_per_s / 1e9:.3g} GB/s"
        model = f"{self.settings['model']}, {self.settings['dtype']}, on {self.settings['device']}"
        return [f"{self.command} of {model}; matrix product {measured}", *table, *self.notes]


def machine(device: torch.device) -> dict[str, Any]:
    """Where it was measured, and with which packages."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"device": name, "vlarl": __version__, "python": platform.python_version(), **versions}


def _timing_json(timing: Timing, count: int) -> dict[str, Any]:
    first, third = timing.quartiles
    return {
        "median_s": timing.median,
        "first_quartile_s": first,
        "third_quartile_s": third,
        "min_s": min(timing.seconds),
        "max_s": max(timing.seconds),
        "repeats": len(timing.seconds),
        "per_s": count / timing.median,
        "peak_gib": None if timing.peak_bytes is None else timing.peak_bytes / GIB,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _quartiles(timing: Timing) -> str:
    return "-".join(_ms(seconds) for seconds in timing.quartiles)


def _peak(timing: Timing) -> str:
    return "" if timing.peak_bytes is None else f"{timing.peak_bytes / GIB:.2f}"
