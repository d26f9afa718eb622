"""Meta-World's tasks by suite. Suites share tasks: two tasks are the same if their names are.

A test compares the table with the package.
"""

from __future__ import annotations

_TEN = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
_TWENTY_FIVE = (
    *_TEN,
    "coffee-pull-v3",
    "pick-out-of-hole-v3",
    "disassemble-v3",
    "pick-place-wall-v3",
    "basketball-v3",
    "stick-pull-v3",
    "button-press-wall-v3",
    "faucet-open-v3",
    "door-lock-v3",
    "lever-pull-v3",
    "sweep-into-v3",
    "faucet-close-v3",
    "coffee-button-v3",
    "button-press-topdown-wall-v3",
    "dial-turn-v3",
)
_FIFTY = (
    *("assembly-v3", "basketball-v3", "bin-picking-v3", "box-close-v3", "button-press-topdown-v3"),
    *("button-press-topdown-wall-v3", "button-press-v3", "button-press-wall-v3", "coffee-button-v3", "coffee-pull-v3"),
    *("coffee-push-v3", "dial-turn-v3", "disassemble-v3", "door-close-v3", "door-lock-v3", "door-open-v3"),
    *("door-unlock-v3", "hand-insert-v3", "drawer-close-v3", "drawer-open-v3", "faucet-open-v3", "faucet-close-v3"),
    *("hammer-v3", "handle-press-side-v3", "handle-press-v3", "handle-pull-side-v3", "handle-pull-v3"),
    *("lever-pull-v3", "pick-place-wall-v3", "pick-out-of-hole-v3", "pick-place-v3", "plate-slide-v3"),
    *("plate-slide-side-v3", "plate-slide-back-v3", "plate-slide-back-side-v3", "peg-insert-side-v3"),
    *("peg-unplug-side-v3", "soccer-v3", "stick-push-v3", "stick-pull-v3", "push-v3", "push-wall-v3"),
    *("push-back-v3", "reach-v3", "reach-wall-v3", "shelf-place-v3", "sweep-into-v3", "sweep-v3"),
    *("window-open-v3", "window-close-v3"),
)

METAWORLD_TASKS: dict[str, tuple[str, ...]] = {
    "metaworld_mt10": _TEN,
    "metaworld_mt25": _TWENTY_FIVE,
    "metaworld_mt50": _FIFTY,
    "metaworld_ml10": (
        *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-close-v3", "button-press-topdown-v3"),
        *("peg-insert-side-v3", "window-open-v3", "sweep-v3", "basketball-v3"),
    ),
    "metaworld_ml10_test": ("drawer-open-v3", "door-close-v3", "shelf-place-v3", "sweep-into-v3", "lever-pull-v3"),
    "metaworld_ml25": _TWENTY_FIVE,
    "metaworld_ml25_test": ("basketball-v3", "door-close-v3", "shelf-place-v3", "sweep-v3", "button-press-v3"),
    "metaworld_ml45": (
        *("assembly-v3", "basketball-v3", "button-press-topdown-v3", "button-press-topdown-wall-v3"),
        *("button-press-v3", "button-press-wall-v3", "coffee-button-v3", "coffee-pull-v3", "coffee-push-v3"),
        *("dial-turn-v3", "disassemble-v3", "door-close-v3", "door-open-v3", "drawer-close-v3", "drawer-open-v3"),
        *("faucet-open-v3", "faucet-close-v3", "hammer-v3", "handle-press-side-v3", "handle-press-v3"),
        *("handle-pull-side-v3", "handle-pull-v3", "lever-pull-v3", "pick-place-wall-v3", "pick-out-of-hole-v3"),
        *("push-back-v3", "pick-place-v3", "plate-slide-v3", "plate-slide-side-v3", "plate-slide-back-v3"),
        *("plate-slide-back-side-v3", "peg-insert-side-v3", "peg-unplug-side-v3", "soccer-v3", "stick-push-v3"),
        *("stick-pull-v3", "push-wall-v3", "push-v3", "reach-wall-v3", "reach-v3", "shelf-place-v3"),
        *("sweep-into-v3", "sweep-v3", "window-open-v3", "window-close-v3"),
    ),
    "metaworld_ml45_test": ("bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3"),
}
"""Meta-World's name of each task, by suite and in the benchmark's own order."""
