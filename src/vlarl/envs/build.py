"""From the configuration to parallel environments."""

from __future__ import annotations

from vlarl.config.known import GYM, KNOWN_SUITES, PROMPTS, is_prompts
from vlarl.config.schema import EnvConfig, GymConfig, PromptsConfig
from vlarl.config.suites import cameras_of, suites_of
from vlarl.envs.base import EnvFactory, EnvPool, RewardMode
from vlarl.envs.process_pool import WorkerPool
from vlarl.envs.prompts.arithmetic import ArithmeticPrompts
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.shapes import ShapePrompts
from vlarl.envs.prompts.source import PromptSource
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.errors import UsageError

NO_DATA = PromptsConfig()

BUILTIN_PROMPTS: dict[str, type[ArithmeticPrompts] | type[ShapePrompts]] = {
    "prompts_arithmetic": ArithmeticPrompts,
    "prompts_shapes": ShapePrompts,
}


def build_pool(
    env: EnvConfig,
    gym: GymConfig,
    num_envs: int,
    image_size: int,
    reward: RewardMode,
    prompts: PromptsConfig = NO_DATA,
) -> EnvPool:
    """Parallel environments of the configured suites; `prompts` is read by the suite of that name."""
    if is_prompts(env.suite):
        return PromptPool(build_prompts(env.suite, prompts), num_envs)
    if env.suite.startswith("tabletop_"):
        return TabletopPool(suites_of(env), num_envs, image_size, cameras_of(env), reward, max_steps=env.max_steps)
    if env.suite == GYM and gym.batched:
        from vlarl.envs.gym.vector import GymVectorPool

        return GymVectorPool(gym, env, num_envs, image_size, reward)
    return WorkerPool(build_factory(env, gym, image_size, reward), num_envs, env.timeout_s, env.lockstep)


def build_prompts(suite: str, prompts: PromptsConfig) -> PromptSource:
    """The prompts of a suite: the user's data, or a built-in one."""
    if suite == PROMPTS:
        from vlarl.envs.prompts.dataset import PromptDataset

        return PromptDataset(prompts)
    return BUILTIN_PROMPTS[suite]()


def build_factory(env: EnvConfig, gym: GymConfig, image_size: int, reward: RewardMode) -> EnvFactory:
    """The factory for one environment of the configured suite, in a process of its own."""
    if env.suite == GYM:
        from vlarl.envs.gym.env import gym_factory

        return gym_factory(gym, env, image_size, reward)
    if env.suite.startswith("libero_"):
        from vlarl.envs.libero import libero_factory

        return libero_factory(env, image_size, reward)
    if env.suite.startswith("metaworld_"):
        from vlarl.envs.metaworld import metaworld_factory

        return metaworld_factory(env, image_size, reward)
    suites = [suite for suite in KNOWN_SUITES if not suite.startswith(("tabletop_", PROMPTS))]
    raise UsageError(f"env.suite: {env.suite!r} does not run in processes; those that do: {', '.join(suites)}.")


def refuse_missing_simulator(env: EnvConfig) -> None:
    """Refuse a suite whose simulator, or a file that it needs, is not on this machine."""
    if env.suite.startswith("libero_"):
        from vlarl.envs.libero import find_installed

        find_installed(env)
    if env.suite.startswith("metaworld_"):
        from vlarl.envs.metaworld import refuse_not_installed

        refuse_not_installed()
