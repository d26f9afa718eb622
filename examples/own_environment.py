"""An environment of your own: any gymnasium.Env, given to vlarl.train as the function that makes it.

    python examples/own_environment.py            # two short iterations: half a minute on two CPU cores

The policy has fresh weights here, so this shows how the parts fit together, not what they reach. With a
checkpoint of your own, set policy.path. docs/adding-an-env.md has every option of section gym.
"""

from typing import Any

import gymnasium
import numpy as np

import vlarl

SIZE = 64  # pixels of the image
REACHED = 0.25  # distance at which the goal counts as reached


class ReachEnv(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """A dot that is moved to a square by two-dimensional actions; the observation is an image."""

    def __init__(self, speed: float = 0.2) -> None:
        self.speed = speed
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {"pixels": gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The seed determines everything random: the same seed must give the same episode."""
        super().reset(seed=seed)
        self.dot, self.goal = self.np_random.uniform(-0.8, 0.8, (2, 2))
        return self._observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the dot. `info["success"]` says at every step whether the goal is reached."""
        before = np.linalg.norm(self.dot - self.goal)
        self.dot = np.clip(self.dot + self.speed * np.asarray(action), -1.0, 1.0)
        distance = np.linalg.norm(self.dot - self.goal)
        reached = bool(distance < REACHED)
        return self._observation(), float(before - distance), reached, False, {"success": reached}

    def _observation(self) -> dict[str, np.ndarray]:
        image = np.full((SIZE, SIZE, 3), 40, np.uint8)
        for point, color in ((self.goal, (60, 180, 90)), (self.dot, (220, 70, 60))):
            column, row = ((point + 1) / 2 * (SIZE - 9)).astype(int)
            image[row : row + 9, column : column + 9] = color
        return {"pixels": image}


def make_env(speed: float) -> ReachEnv:
    """Called once in the process of each environment, with gym.kwargs."""
    return ReachEnv(speed)


def main() -> None:
    """Train on it, then evaluate the checkpoint on it."""
    summary = vlarl.train(
        env=make_env,
        overrides={
            "policy.path": "init:tiny-oft",
            "gym.kwargs": {"speed": 0.2},
            "gym.images": ["pixels"],
            "gym.instructions": ["move the dot to the square"],
            "gym.actions": [0, 1],  # which of the policy's seven dimensions the environment takes
            "gym.num_states": 10,
            "env.max_steps": 16,
            "env.num_envs": 2,
            "reward.source": "dense",  # what step returns; without it the reward is 1 for success
            "run.iterations": 2,
            "rollout.num_groups": 2,
            "rollout.group_size": 4,
            "eval.states_per_task": 2,
            "eval.videos": 1,
        },
    )
    checkpoint = summary.run_dir / "checkpoints" / "final"
    result = vlarl.evaluate(checkpoint, env=make_env, episodes=2, num_envs=2)
    print(f"success on {len(result.counted)} episodes: {result.success_rate:.0%}; {summary.report}")


if __name__ == "__main__":
    main()
