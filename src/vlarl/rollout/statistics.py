"""Summary metrics of an iteration's episodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from vlarl.types import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """The `rollout/` metrics. Crashed episodes are left out of the means, unscored ones out of the mean return."""
    ran = [t for t in trajectories if t.status != "crashed"]
    usable = [t for t in ran if t.status == "ok"]
    failures = sum(t.reward_error is not None for t in ran)
    count = max(len(ran), 1)
    env_steps = sum(t.length for t in trajectories)
    return {
        "rollout/success_rate": sum(t.success for t in ran) / count,
        "rollout/mean_return": sum(t.env_return for t in usable) / max(len(usable), 1),
        "rollout/std_return": float(np.std([t.env_return for t in usable])) if usable else 0.0,
        "rollout/mean_length": sum(t.length for t in ran) / count,
        "rollout/num_trajectories": float(len(usable)),
        "rollout/num_crashed": float(len(trajectories) - len(ran)),
        "rollout/retried_episodes": float(sum(t.num_retries for t in trajectories)),
        "rollout/reward_failures": float(failures),
        "rollout/reward_failure_rate": failures / count,
        "rollout/collection_time": seconds,
        "rollout/env_steps_per_s": env_steps / seconds,
        "perf/decisions_per_s": sum(len(t.transitions) for t in trajectories) / seconds,
    }


def reward_part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean and std over episodes of what each part of a combined reward gives, before its weight."""
    by_part: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items() if trajectory.status == "ok" else ():
            by_part.setdefault(re.sub(r"[^\w.-]", "_", name), []).append(value)
    means = {f"reward/{name}/mean": float(np.mean(values)) for name, values in by_part.items()}
    return means | {f"reward/{name}/std": float(np.std(values)) for name, values in by_part.items()}


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many updates the learner, at `version`, is ahead of the weights that decided; empty without decisions."""
    ages = [version - t.version for trajectory in trajectories for t in trajectory.transitions]
    if not ages:
        return {}
    return {"train/staleness_mean": sum(ages) / len(ages), "train/staleness_max": float(max(ages))}
