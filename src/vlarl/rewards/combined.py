"""A weighted sum of rewards, with weights that may differ from task to task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vlarl.config.recipe import RecipeRule
from vlarl.rewards.base import Reward
from vlarl.types import FloatArray, Trajectory

LABELS = ("data_source", "label")  # columns of a prompt that a recipe may name


class CombinedReward(Reward):
    """The weighted sum of rewards, step by step."""

    def __init__(
        self, parts: Mapping[str, Reward], weights: Mapping[str, float], recipe: Sequence[RecipeRule] = ()
    ) -> None:
        """`weights` apply where no rule of the recipe matches; a reward without a weight is not used."""
        self.parts = dict(parts)
        self.weights = dict(weights)
        self.recipe = tuple(recipe)
        self.env_reward = "dense" if any(p.env_reward == "dense" for p in parts.values()) else "sparse"
        self.batch_size = max(p.batch_size for p in parts.values())
        self.reads_images = any(p.reads_images for p in parts.values())

    def score(self, trajectory: Trajectory) -> Trajectory:
        """The weighted sum of all rewards for one episode."""
        return self.score_all([trajectory])[0]

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The weighted sum of all rewards; a reward scores only the episodes in which its weight is not 0, and one that
        does not concern an episode is left out of its sum."""
        totals: list[list[FloatArray]] = [[np.zeros_like(t.rewards) for t in e.transitions] for e in trajectories]
        returns: list[dict[str, float]] = [{} for _ in trajectories]
        weights = [self.weights_of(trajectory) for trajectory in trajectories]
        for name, part in self.parts.items():
            indices = [index for index, by_name in enumerate(weights) if by_name.get(name, 0.0) != 0.0]
            results = part.score_some([trajectories[index] for index in indices]) if indices else []
            for index, scored in zip(indices, results, strict=True):
                if scored is None:
                    continue
                returns[index][name] = scored.env_return
                for total, transition in zip(totals[index], scored.transitions, strict=True):
                    total += np.float32(weights[index][name]) * transition.rewards
        return [
            replace(trajectory.with_rewards(total), reward_parts=by_part)
            for trajectory, total, by_part in zip(trajectories, totals, returns, strict=True)
        ]

    def weights_of(self, trajectory: Trajectory) -> Mapping[str, float]:
        """The weights of the first rule that matches the episode's task, else the default ones."""
        task, instruction = trajectory.task, trajectory.final_observation.instruction
        prompt = trajectory.final_observation.prompt
        labels = [str(prompt.columns[name]) for name in LABELS if name in prompt.columns] if prompt else []
        matching = (rule.weights for rule in self.recipe if rule.fits(task.suite, task.task_id, instruction, labels))
        return next(matching, self.weights)

    def move_to_cpu(self) -> bool:
        """Move every part to the CPU."""
        return any([part.move_to_cpu() for part in self.parts.values()])
