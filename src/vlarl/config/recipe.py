"""A line of `reward.recipe`: which weights apply to which tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

FORM = "write it as `LABEL -> NAME=WEIGHT NAME=WEIGHT`, such as `tabletop_goal/3 -> sparse=1 shaped=0.5`"


@dataclass(frozen=True)
class RecipeRule:
    """The weight of each reward for the tasks that match a label."""

    label: str
    weights: dict[str, float]

    def fits(self, suite: str, task_id: int, instruction: str, labels: Sequence[str] = ()) -> bool:
        """Whether the label is this task's suite, its `suite/task`, one of its own labels, or a pattern of its
        instruction."""
        names = (suite, f"{suite}/{task_id}", instruction, *labels)
        return any(fnmatchcase(name.lower(), self.label.lower()) for name in names)


def parse_rule(text: str) -> RecipeRule:
    """Parse `LABEL -> NAME=WEIGHT …`; a ValueError says what is wrong with it."""
    label, arrow, right = (part.strip() for part in text.partition("->"))
    if not label or not arrow or not right:
        raise ValueError(FORM)
    weights: dict[str, float] = {}
    for item in right.split():
        name, _, text = item.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            raise ValueError(f"{item!r} gives no weight; {FORM}") from None
        if not name or not math.isfinite(weight):
            raise ValueError(f"{item!r} gives no weight; {FORM}")
        if name in weights:
            raise ValueError(f"it gives {name} two weights; keep one of them")
        weights[name] = weight
    return RecipeRule(label, weights)
