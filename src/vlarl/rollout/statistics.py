"""What an iteration's episodes look like from afar."""

from __future__ import annotations

from collections.abc import Sequence

from vlarl.types import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """The `rollout/` metrics. Crashed episodes are counted and left out of the means."""
    whole = [t for t in trajectories if t.status == "ok"]
    count = max(len(whole), 1)
    env_steps = sum(t.length for t in trajectories)
    return {
        "rollout/success_rate": sum(t.success for t in whole) / count,
        "rollout/mean_return": sum(t.env_return for t in whole) / count,
        "rollout/mean_length": sum(t.length for t in whole) / count,
        "rollout/num_trajectories": float(len(whole)),
        "rollout/num_crashed": float(len(trajectories) - len(whole)),
        "rollout/collection_time": seconds,
        "rollout/env_steps_per_s": env_steps / seconds,
        "perf/decisions_per_s": sum(len(t.transitions) for t in trajectories) / seconds,
    }
