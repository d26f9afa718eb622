"""Comparison of two evaluations: their common episodes, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vlarl.config.words import counted
from vlarl.errors import UsageError
from vlarl.evaluation.record import EvalRecord, of_states, summary
from vlarl.observability.significance import mcnemar_p_value
from vlarl.types import EpisodeResult, EvalResult

SIGNIFICANT = 0.05

Key = tuple[str, int, int, int]  # suite, task, initial state, seed


@dataclass(frozen=True)
class Comparison:
    """Episodes that both evaluations ran, in the same order, and those that only one of them did."""

    a: EvalResult
    b: EvalResult
    unpaired_a: tuple[str, ...]  # ids of episodes of A that B lacks, or that crashed in B; below, vice versa
    unpaired_b: tuple[str, ...]
    protocol_states: Mapping[str, frozenset[tuple[str, int]]] = field(default_factory=dict)  # of two; else empty

    def by_protocol(self) -> dict[str, Comparison]:
        """The episodes of each of two protocols alone; empty if there is one, or if one of them has no episode."""
        parts = {
            name: replace(self, a=of_states(self.a, own), b=of_states(self.b, own), protocol_states={})
            for name, own in self.protocol_states.items()
        }
        return parts if all(part.a.episodes for part in parts.values()) else {}

    @property
    def only_a(self) -> int:
        """Episodes that A won and B did not."""
        return sum(a.success and not b.success for a, b in self._pairs)

    @property
    def only_b(self) -> int:
        """Episodes that B won and A did not."""
        return sum(b.success and not a.success for a, b in self._pairs)

    @property
    def p_value(self) -> float:
        """Of McNemar's exact test: how often two equally good policies would differ this much."""
        return mcnemar_p_value(self.only_a, self.only_b)

    @property
    def _pairs(self) -> list[tuple[EpisodeResult, EpisodeResult]]:
        return list(zip(self.a.episodes, self.b.episodes, strict=True))

    def in_words(self) -> str:
        """The outcome as a sentence."""
        total, differ = len(self.a.episodes), self.only_a + self.only_b
        if differ == 0:
            return f"A and B had the same outcome on {'the one episode' if total == 1 else f'all {total} episodes'}."
        counts = (("B", self.only_b), ("A", self.only_a))
        first, second = sorted(counts, key=lambda count: -count[1])
        verdict = f"{first[0]} is better" if self.p_value < SIGNIFICANT else "that may be chance"
        episodes = f"{counted(differ, 'episode')} on which they differ ({total} compared)"
        wins = f"{first[0]} wins {first[1]}, {second[0]} wins {second[1]}"
        return f"{wins} of {episodes}: p = {_shown(self.p_value)}, {verdict}."

    def to_json(self) -> dict[str, Any]:
        """The whole comparison, for programs."""
        both = {name: part.to_json() for name, part in self.by_protocol().items()}
        by_suite = [
            (suite, part.by_task(), self.b.by_suite()[suite].by_task()) for suite, part in self.a.by_suite().items()
        ]
        return {
            "episodes": len(self.a.episodes),
            "both_won": self.a.won - self.only_a,
            "only_a_won": self.only_a,
            "only_b_won": self.only_b,
            "neither_won": len(self.a.episodes) - self.a.won - self.only_b,
            "p_value": self.p_value,
            "in_words": self.in_words(),
            "a": summary(self.a),
            "b": summary(self.b),
            "tasks": [
                {
                    **({"suite": suite} if len(by_suite) > 1 else {}),
                    "task_id": i,
                    "instruction": a[i].episodes[0].instruction,
                    "a": summary(a[i]),
                    "b": summary(b[i]),
                }
                for suite, a, b in by_suite
                for i in a
            ],
            "unpaired_a": list(self.unpaired_a),
            "unpaired_b": list(self.unpaired_b),
            **({"by_protocol": both} if both else {}),
        }


def compare(a: EvalRecord, b: EvalRecord) -> Comparison:
    """Pair the episodes of two evaluations by task, initial state and seed; UsageError where they can't be paired."""
    _check_settings(a, b)
    ours, theirs = _counted(a), _counted(b)
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise UsageError(
            f"the two evaluations have no episode in common (seeds {a.settings.seed} and {b.settings.seed}, tasks "
            f"{list(a.settings.task_ids)} and {list(b.settings.task_ids)}): evaluate both with the same --seed and "
            "--tasks, or with --against."
        )
    return Comparison(
        EvalResult(tuple(ours[key] for key in both)),
        EvalResult(tuple(theirs[key] for key in both)),
        tuple(ours[key].task.episode_id for key in sorted(ours.keys() - theirs.keys())),
        tuple(theirs[key].task.episode_id for key in sorted(theirs.keys() - ours.keys())),
        a.settings.protocol_states() if a.settings.protocol_states() == b.settings.protocol_states() else {},
    )


def _counted(record: EvalRecord) -> dict[Key, EpisodeResult]:
    return {(*e.task.key, e.task.init_state, e.task.seed): e for e in record.result.counted}


def _check_settings(a: EvalRecord, b: EvalRecord) -> None:
    for name in ("suite", "protocol", "temperature", "max_steps", "gym", "prompts", "rollout"):
        ours, theirs = getattr(a.settings, name), getattr(b.settings, name)
        if ours != theirs:
            raise UsageError(
                f"the two evaluations can't be compared: {name} is {ours} in A and {theirs} in B. Evaluate one of "
                "them again as the other was, or both at once with `vlarl eval A --against B`."
            )


def _shown(p_value: float) -> str:
    return f"{p_value:.1e}" if p_value < 1e-4 else f"{p_value:.4f}"
