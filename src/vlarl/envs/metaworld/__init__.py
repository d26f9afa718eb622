"""Meta-World: a robot arm in MuJoCo, fifty tasks in nine suites, each with a scripted expert."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlarl.config.schema import Camera, EnvConfig
from vlarl.config.suites import cameras_of, suites_of
from vlarl.envs.base import RewardMode, SingleEnv, SuiteSpec, united
from vlarl.envs.metaworld.suites import metaworld_spec
from vlarl.envs.mujoco import render_backend, render_variables
from vlarl.errors import MissingExtraError

if TYPE_CHECKING:
    from vlarl.envs.metaworld.env import MetaWorldEnv
    from vlarl.envs.metaworld.expert import MetaWorldExpert


@dataclass(frozen=True)
class MetaWorldFactory:
    """Makes environments of one suite; see `EnvFactory`."""

    spec: SuiteSpec
    cameras: tuple[Camera, ...]
    image_size: int
    reward: RewardMode
    exact_pixels: bool
    render: str  # a value of MUJOCO_GL
    render_gpu: int | None

    @property
    def image_shape(self) -> tuple[int, int, int, int]:
        """(I, H, W, 3) of an observation."""
        return (len(self.cameras), self.image_size, self.image_size, 3)

    def variables(self, slot: int) -> Mapping[str, str]:
        """Environment variables of the process: how it renders, and one thread."""
        return render_variables(self.render, self.render_gpu, pyopengl=self.render != "glx")

    def build(self) -> MetaWorldEnv:
        """The environment; called in its process."""
        from vlarl.envs.metaworld.env import MetaWorldEnv

        return MetaWorldEnv(self.spec, self.cameras, self.image_size, self.reward, self.exact_pixels)

    def build_expert(self, env: SingleEnv) -> MetaWorldExpert:
        """The scripted expert for an environment of this factory."""
        from vlarl.envs.metaworld.env import MetaWorldEnv
        from vlarl.envs.metaworld.expert import MetaWorldExpert

        assert isinstance(env, MetaWorldEnv)
        return MetaWorldExpert(env)


def metaworld_factory(config: EnvConfig, image_size: int, reward: RewardMode) -> MetaWorldFactory:
    """The factory of the configured suite; refuses if Meta-World is not installed."""
    refuse_not_installed()
    return MetaWorldFactory(
        united([metaworld_spec(suite, config.max_steps) for suite in suites_of(config)]),
        cameras_of(config),
        image_size,
        reward,
        config.exact_pixels,
        render_backend(config.render),
        config.render_gpu,
    )


def refuse_not_installed() -> None:
    """Refuse if Meta-World is not installed."""
    if importlib.util.find_spec("metaworld") is None:
        raise MissingExtraError("metaworld", "metaworld")
