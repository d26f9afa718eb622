"""LIBERO: four suites of ten tasks and one of ninety, for a Panda arm in MuJoCo.

suites.py   the tasks, without loading the simulator
assets.py   meshes and textures; importing the package without its prompts
physics.py  a task's simulator without rendering
render.py   images
env.py      both behind `SingleEnv`, and all conventions
expert.py   scripted demonstrator
stock.py    the package's own environment, for comparison
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlarl.config.schema import EnvConfig
from vlarl.config.suites import cameras_of, suites_of
from vlarl.envs.base import Expert, SingleEnv, SuiteSpec, united
from vlarl.envs.libero.assets import find_assets
from vlarl.envs.libero.suites import libero_spec, package_folder
from vlarl.envs.libero.versions import KNOWN_GOOD_MUJOCO, mujoco_problem
from vlarl.envs.mujoco import render_backend, render_variables
from vlarl.errors import MissingExtraError, UsageError

__all__ = ["KNOWN_GOOD_MUJOCO", "LiberoFactory", "find_installed", "libero_factory", "mujoco_problem"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiberoFactory:
    """Makes LIBERO environments in their processes."""

    spec: SuiteSpec
    image_shape: tuple[int, int, int, int]  # (I, H, W, 3) of an observation
    assets: Path
    cameras: tuple[Literal["agent", "wrist"], ...]
    exact_pixels: bool
    render: Literal["auto", "egl", "osmesa", "glx"]
    render_gpu: int | None

    def variables(self, slot: int) -> Mapping[str, str]:
        """Environment variables of the process: how it renders, and one thread."""
        backend = render_backend(self.render)
        return render_variables(backend, self.render_gpu, pyopengl=backend in ("egl", "osmesa", "glx"))

    def build(self) -> SingleEnv:
        """The environment; called in its process."""
        from vlarl.envs.libero.env import LiberoEnv

        return LiberoEnv(self.spec, self.assets, self.cameras, self.image_shape[1], self.exact_pixels)

    def build_expert(self, env: SingleEnv) -> Expert:
        """The scripted expert for an environment of this factory."""
        from vlarl.envs.libero.env import LiberoEnv
        from vlarl.envs.libero.expert import LiberoExpert

        assert isinstance(env, LiberoEnv)
        return LiberoExpert(env)


def libero_factory(config: EnvConfig, image_size: int, reward: Literal["sparse", "dense"]) -> LiberoFactory:
    """The factory of a configured suite; anything missing on this machine is refused here, before a run starts."""
    if reward == "dense":
        raise UsageError(f"reward: {config.suite} rewards success only; choose another reward than dense.")
    spec = united([libero_spec(suite, config.max_steps) for suite in suites_of(config)])
    assets, mujoco = find_installed(config)
    if problem := mujoco_problem(mujoco):
        _log.warning("MuJoCo %s: %s", mujoco, problem)
    cameras = cameras_of(config)
    shape = (len(cameras), image_size, image_size, 3)
    return LiberoFactory(spec, shape, assets, cameras, config.exact_pixels, config.render, config.render_gpu)


def find_installed(config: EnvConfig) -> tuple[Path, str]:
    """The folder of the assets and the version of MuJoCo; UsageError if either is missing."""
    package_folder()
    assets = find_assets(config.assets)
    try:
        return assets, importlib.metadata.version("mujoco")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError("mujoco", "libero") from None
