"""What follows from the configured suite, without its simulator."""

from __future__ import annotations

from dataclasses import replace

from vlarl.config.known import GYM, SUITES, SuiteFacts
from vlarl.config.schema import Camera, EnvConfig, GymConfig

CAMERAS: tuple[Camera, ...] = ("agent", "wrist")  # in the order that policies read them


def suite_facts(env: EnvConfig, gym: GymConfig) -> SuiteFacts | None:
    """Tasks, limits and states of the configured suite; None for a suite that isn't known."""
    if env.suite == GYM:
        num_eval_states = num_gym_eval_states(gym)
        return SuiteFacts(
            num_tasks=max(1, len(gym.instructions)),
            max_steps=env.max_steps,
            num_eval_states=num_eval_states,
            num_benchmark_states=num_eval_states,
            in_processes=not gym.batched,
            has_dense_reward=True,
        )
    facts = SUITES.get(env.suite)
    return facts if facts is None or env.max_steps is None else replace(facts, max_steps=env.max_steps)


def cameras_of(env: EnvConfig, num_images: int | None = None) -> tuple[Camera, ...]:
    """The cameras that are drawn: as configured, or as many as a policy reads."""
    return env.cameras or CAMERAS[: num_images or 1]


def num_gym_eval_states(gym: GymConfig) -> int:
    """How many of a Gymnasium environment's states are for evaluation: two fifths, the last ones."""
    return gym.num_states - gym.num_states * 3 // 5
