"""Summary metrics of episodes, of a rollout and of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from vlarl.config.known import is_prompts
from vlarl.solutions import find_solution
from vlarl.types import EpisodeResult, EvalResult, Response, Trajectory, group_members


def rollout_metrics(
    trajectories: Sequence[Trajectory], seconds: float, segments: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """The `rollout/` metrics. Crashed episodes are left out of the means, unscored ones out of the mean return.

    `trajectories` are the episodes that ended; `segments` is what was collected, where that is not the same: without an
    episode that ended there are no means then.
    """
    ran = [t for t in trajectories if t.status != "crashed"]
    usable = [t for t in ran if t.status == "ok"]
    failures = sum(t.reward_error is not None for t in ran)
    count = max(len(ran), 1)
    collected = trajectories if segments is None else segments
    env_steps = sum(t.length for t in collected)
    responses = [response for t in ran if (response := t.response) is not None]
    suites = {t.task.suite for t in trajectories}
    means = {
        **({"rollout/success_rate": sum(t.success for t in ran) / count} if is_judged(ran) else {}),
        "rollout/mean_return": sum(t.episode_return for t in usable) / max(len(usable), 1),
        "rollout/std_return": float(np.std([t.episode_return for t in usable])) if usable else 0.0,
        "rollout/mean_length": sum(t.episode_length for t in ran) / count,
    }
    return {
        **(means if segments is None or ran else {}),
        **({} if segments is None else {"rollout/num_segments": float(len(segments))}),
        "rollout/num_trajectories": float(len(usable)),
        "rollout/num_crashed": float(len(trajectories) - len(ran)),
        "rollout/retried_episodes": float(sum(t.num_retries for t in trajectories)),
        "rollout/reward_failures": float(failures),
        "rollout/reward_failure_rate": failures / count,
        "rollout/collection_time": seconds,
        "rollout/env_steps_per_s": env_steps / seconds,
        "perf/decisions_per_s": sum(len(t.transitions) for t in collected) / seconds,
        **(_success_by_suite(ran, "rollout") if len(suites) > 1 else {}),
        **_group_metrics(usable),
        **response_metrics(responses, "rollout/"),
        **({"perf/response_tokens_per_s": sum(r.num_tokens for r in responses) / seconds} if responses else {}),
    }


def busy_metrics(before: float | None, after: float | None, seconds: float, num_envs: int) -> dict[str, float]:
    """How much of the rollout the simulators worked, by a pool's `busy_s` before and after it; empty if not known."""
    if before is None or after is None:
        return {}
    return {"perf/simulators_busy": (after - before) / (seconds * num_envs)}


def _success_by_suite(episodes: Sequence[Trajectory | EpisodeResult], prefix: str) -> dict[str, float]:
    """`val/libero_goal/success_rate` and its kin: the fraction of successes in each suite."""
    by_suite: dict[str, list[bool]] = {}
    for episode in episodes:
        by_suite.setdefault(episode.task.suite, []).append(episode.success)
    return {f"{prefix}/{suite}/success_rate": sum(won) / len(won) for suite, won in by_suite.items()}


def _group_metrics(usable: Sequence[Trajectory]) -> dict[str, float]:
    """How much the members of a group differ; empty without a group of several episodes."""
    groups = [members for members in group_members(usable) if len(members) > 1]
    if not groups:
        return {}
    returns = np.array([t.episode_return for t in usable])
    metrics = {"rollout/group_std_return": float(np.mean([returns[members].std() for members in groups]))}
    texts = [t.transitions[-1].text for t in usable]
    if all(text is not None for text in texts):
        fractions = [len({texts[member] for member in members}) / len(members) for members in groups]
        metrics["rollout/unique_responses"] = float(np.mean(fractions))
    return metrics


def is_judged(episodes: Sequence[Trajectory | EpisodeResult]) -> bool:
    """Whether success is known: always, except of prompts none of which has a solution."""
    responses = [episode.response for episode in episodes if is_prompts(episode.task.suite)]
    solutions = [r is not None and find_solution(r.prompt.columns) is not None for r in responses]
    return not solutions or any(solutions)


def response_metrics(responses: Sequence[Response], prefix: str = "") -> dict[str, float]:
    """Lengths of texts in tokens, and the fraction that was cut off; empty without texts."""
    if not responses:
        return {}
    lengths = [response.num_tokens for response in responses]
    return {
        f"{prefix}response_length": float(np.mean(lengths)),
        f"{prefix}response_length_max": float(max(lengths)),
        f"{prefix}truncated_fraction": sum(response.cut_off for response in responses) / len(responses),
    }


def reward_part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean and std over episodes of what each part of a combined reward gives, before its weight."""
    return _part_metrics([t.episode_parts for t in trajectories if t.status == "ok"], "reward")


def evaluation_metrics(result: EvalResult) -> dict[str, float]:
    """The `val/` metrics. Crashed episodes are counted apart: they say nothing about the policy."""
    scored = [episode for episode in result.counted if episode.reward_error is None]
    responses = [e.response for e in result.counted if e.response is not None]
    return {
        **({"val/success_rate": result.success_rate} if is_judged(result.counted) else {}),
        **(_success_by_suite(result.counted, "val") if len(result.by_suite()) > 1 else {}),
        "val/mean_reward": result.mean_return,
        "val/std_reward": float(np.std([e.episode_return for e in scored])) if scored else float("nan"),
        "val/mean_length": result.mean_length,
        "val/crashed": float(result.num_crashed),
        "val/reward_failures": float(result.num_unscored),
        **response_metrics(responses, "val/"),
        **_part_metrics([e.reward_parts for e in scored], "val/reward"),
    }


def _part_metrics(returns: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    by_part: dict[str, list[float]] = {}
    for by_name in returns:
        for name, value in by_name.items():
            by_part.setdefault(re.sub(r"[^\w.-]", "_", name), []).append(value)
    means = {f"{prefix}/{name}/mean": float(np.mean(values)) for name, values in by_part.items()}
    return means | {f"{prefix}/{name}/std": float(np.std(values)) for name, values in by_part.items()}


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many updates the learner, at `version`, is ahead of the weights that decided; empty without decisions."""
    ages = [version - t.version for trajectory in trajectories for t in trajectory.transitions]
    if not ages:
        return {}
    return {"train/staleness_mean": sum(ages) / len(ages), "train/staleness_max": float(max(ages))}
