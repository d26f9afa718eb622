"""One of Meta-World's environments, which starts from a state given by its index."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.mujoco import log_warnings
from vlarl.envs.signals import truth

State = NDArray[np.float64]
"""Meta-World's own observation [39]: hand, fingers, objects, the same of the previous step, goal."""


@dataclass(frozen=True)
class SimulatorStep:
    """Meta-World's result of a step."""

    state: State
    reward: float  # shaped, between 0 and 10
    success: bool


class Simulator:
    """The physics of one task. Models take a quarter of a second to load, so they are kept and reset."""

    def __init__(self, env_name: str) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        log_warnings()
        self._sim: Any = ALL_V3_ENVIRONMENTS[env_name]()
        self._name = env_name
        self._sim.max_path_length = sys.maxsize  # the pool applies the time limit
        self._sim.seeded_rand_vec = True
        self._sim._set_task_called = True  # `start` does what `set_task` would
        self._sim._partially_observable = False  # experts observe the goal
        self._sim.__dict__.pop("sawyer_observation_space", None)  # cached before, without the goal

    @property
    def model(self) -> Any:
        """MuJoCo's model."""
        return self._sim.model

    @property
    def data(self) -> Any:
        """MuJoCo's state of it."""
        return self._sim.data

    @property
    def hand(self) -> State:
        """Position [3] of the hand in metres."""
        return np.array(self._sim.get_endeff_pos())

    @property
    def fingers(self) -> State:
        """How far each finger [2] is from closed, in metres and with the signs of LIBERO's: (0.04, -0.03) is open."""
        closed: State = np.array([self.model.joint("r_close").range[1], self.model.joint("l_close").range[0]])
        now: State = np.concatenate([self.data.joint("r_close").qpos, self.data.joint("l_close").qpos])
        return closed - now

    def start(self, state_index: int) -> State:
        """Set the initial state, and return Meta-World's observation."""
        import mujoco

        vector = self._random_vector(state_index)
        self._sim._freeze_rand_vec = True
        self._sim._last_rand_vec = vector
        self._sim.reset()
        # Some tasks move objects after the last simulated step, window-close by 20 cm: recompute the observation.
        mujoco.mj_forward(self.model, self.data)
        self._sim._prev_obs = self._sim._get_curr_obs_combined_no_goal()
        state: State = self._sim._get_obs()
        return state

    def step(self, action: NDArray[np.float64]) -> SimulatorStep:
        """Move by Meta-World's action [4]."""
        state, reward, _, _, info = self._sim.step(action)
        success = truth(info["success"], f"info['success'] of Meta-World's {self._name}")
        return SimulatorStep(state, float(reward), success)

    def _random_vector(self, state_index: int) -> State:
        """Positions of objects and goal in this state. Meta-World samples them, as it rejects some samples."""
        self._sim.seed(zlib.crc32(f"{self._name}/{state_index}".encode()))
        self._sim._freeze_rand_vec = False
        self._sim.reset_model()
        return np.array(self._sim._last_rand_vec)
