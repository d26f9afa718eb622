"""Batched Gymnasium environments to be wrapped: one of arrays that is reset by a mask, one of tensors by indices."""

from typing import ClassVar

import numpy as np
import torch
from fakes.gym_envs import HIGH, LOW, REACHED, SIZE, Reach, scene_image
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv


def vector(num_envs: int, fault: str = "", mode: str = "Disabled") -> SyncVectorEnv:
    """A batch that is reset in Gymnasium's way."""
    return SyncVectorEnv([lambda: _Boxed(fault)] * num_envs, autoreset_mode=AutoresetMode(mode))


class _Boxed(Reach):
    """With the observation space that a batch is made by."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        pixels = spaces.Dict({"front": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)})
        plane = spaces.Box(0.0, 1.0, (2,), np.float64)
        self.observation_space = spaces.Dict(
            {"pixels": pixels, "state": spaces.Box(0.0, 1.0, (2,), np.float32), "goal": plane}
        )


class TensorReach(VectorEnv):
    """The same game on tensors, reset in ManiSkill's way: robots are placed by the first seed, goals by the slot's own."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED, "reset_option": "env_idx"}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_action_space = spaces.Box(LOW, HIGH)
        self.device = torch.device("cpu")
        self.position, self.goal = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self.pixels = torch.zeros(num_envs, SIZE, SIZE, 3, dtype=torch.uint8)
        self.num_resets = 0

    def reset(self, *, seed=None, options=None):
        slots = options["env_idx"]
        generator = torch.Generator().manual_seed(seed[0])
        self.position[slots] = torch.rand(len(slots), 2, generator=generator)
        for slot in slots:
            own = np.random.default_rng(seed[slot])
            self.goal[slot] = torch.from_numpy(own.uniform(0.5, 0.9, 2))
        self.num_resets += 1
        return self._seen(), {}

    def step(self, actions):
        self.position = (self.position + torch.as_tensor(actions)).clamp(0, 1)
        distance = (self.position - self.goal).abs().amax(1)
        reached = distance < REACHED
        return self._seen(), -distance, reached, torch.zeros_like(reached), {"success": reached}

    def _seen(self):
        for slot in range(self.num_envs):  # the same memory again, as a GPU renderer's
            self.pixels[slot] = torch.from_numpy(scene_image(self.position[slot].numpy(), self.goal[slot].numpy()))
        return {"pixels": {"front": self.pixels}, "state": self.position, "goal": self.goal}


def one_too_many(num_envs: int) -> SyncVectorEnv:
    return vector(num_envs + 1)


def resets_by_name(num_envs: int) -> SyncVectorEnv:
    env = vector(num_envs)
    env.metadata["reset_option"] = "names"
    return env
