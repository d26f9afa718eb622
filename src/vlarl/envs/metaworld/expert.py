"""Meta-World's scripted policies as demonstrators."""

from __future__ import annotations

import warnings
from typing import Any

from vlarl.envs.metaworld.env import MetaWorldEnv, from_metaworld
from vlarl.types import FloatArray


class MetaWorldExpert:
    """Plays its environment's running task, from Meta-World's own observation."""

    def __init__(self, env: MetaWorldEnv) -> None:
        self._env = env
        self._policy: Any = None

    def reset(self) -> None:
        """Use the scripted policy of the task that has just started."""
        from metaworld.policies import ENV_POLICY_MAP

        policies: dict[str, Any] = ENV_POLICY_MAP
        self._policy = policies[self._env.env_name]()

    def act(self) -> FloatArray:
        """The next action [7]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised whenever an action is going to be clipped
            return from_metaworld(self._policy.get_action(self._env.state))
