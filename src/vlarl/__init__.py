"""vlarl: reinforcement learning for vision-language-action robot policies.

    import vlarl
    summary = vlarl.train(vlarl.load_config("tabletop_grpo", {"run.seed": 1}))
    policy = vlarl.load_policy(summary.run_dir / "checkpoints" / "final")

The names below load when they are first used, so that importing vlarl, as the command line does, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlarl.config.load import load_config as load_config
    from vlarl.data.sft import finetune as finetune
    from vlarl.evaluation import evaluate as evaluate
    from vlarl.loop import train as train
    from vlarl.policies import load_policy as load_policy

__version__ = "0.1.0"

_HOMES = {
    "train": "vlarl.loop",
    "evaluate": "vlarl.evaluation",
    "finetune": "vlarl.data.sft",
    "load_config": "vlarl.config.load",
    "load_policy": "vlarl.policies",
}

__all__ = ["__version__", "evaluate", "finetune", "load_config", "load_policy", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vlarl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
