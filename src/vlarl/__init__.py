"""vlarl: reinforcement learning for vision-language-action robot policies.

    import vlarl
    summary = vlarl.train("tabletop_grpo", {"run.seed": 1})
    policy = vlarl.load_policy(summary.run_dir / "checkpoints" / "final")

The names below are imported on first use, so that importing vlarl, as the command line does, is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlarl.auto_classes import watch

if TYPE_CHECKING:
    from vlarl.api import compare as compare
    from vlarl.api import evaluate as evaluate
    from vlarl.api import finetune as finetune
    from vlarl.api import train as train
    from vlarl.callbacks import EpisodeRecord as EpisodeRecord
    from vlarl.callbacks import IterationRecord as IterationRecord
    from vlarl.config.schema import Config as Config
    from vlarl.config.source.load import load_config as load_config
    from vlarl.errors import VlarlError as VlarlError
    from vlarl.policies.load import load_policy as load_policy
    from vlarl.types import Trajectory as Trajectory

__version__ = "0.1.0"

_HOMES = {
    "Config": "vlarl.config.schema",
    "EpisodeRecord": "vlarl.callbacks",
    "IterationRecord": "vlarl.callbacks",
    "Trajectory": "vlarl.types",
    "VlarlError": "vlarl.errors",
    "compare": "vlarl.api",
    "evaluate": "vlarl.api",
    "finetune": "vlarl.api",
    "load_config": "vlarl.config.source.load",
    "load_policy": "vlarl.policies.load",
    "train": "vlarl.api",
}

_EXPLAINED = ("load_config", "load_policy")
"""Functions that the commands call too; here their messages name Python arguments instead of flags."""

__all__ = [
    "Config",
    "EpisodeRecord",
    "IterationRecord",
    "Trajectory",
    "VlarlError",
    "__version__",
    "compare",
    "evaluate",
    "finetune",
    "load_config",
    "load_policy",
    "train",
]


watch()  # transformers' Auto classes know OpenVLA folders once vlarl has been imported


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vlarl' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    if name in _EXPLAINED:
        found = import_module("vlarl.python_messages").explained(found)
        found.__module__ = __name__
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
