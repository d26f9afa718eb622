"""The second dataset of an RL run, as section `ptx` names it.

prompts   rows with a prompt and its response ──────────► prompt, text         (envs/prompts/responses.py)
robots    a recording, or experts of the suite ─────────► observation, actions (demos.py)
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from vlarl.config.finetune import DemoConfig
from vlarl.config.known import EXPERTS, is_prompts
from vlarl.config.schema import Config
from vlarl.config.suites import cameras_of, suites_of
from vlarl.config.training_data import TrainingData, by_demonstrations
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import (
    DemoSource,
    SimulatorSource,
    TabletopSource,
    collect_demos,
    open_recording,
    refuse_other_robot,
)
from vlarl.data.recorded_demos import RecordedSource
from vlarl.envs.build import build_factory
from vlarl.envs.prompts.responses import PromptedResponses
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.training.ptx import ImitatedSamples, Ptx
from vlarl.training.ranks import Ranks, SingleRank, on_each
from vlarl.types import Action, Observation

log = logging.getLogger(__name__)

PATH = "ptx.path"


class DemonstratedDecisions:
    """Every frame of demonstrations, with the chunk of actions that follows it."""

    def __init__(self, demos: DemoSet, num_steps: int) -> None:
        self._demos, self._num_steps = demos, num_steps

    def __len__(self) -> int:
        return len(self._demos)

    def sample(self, index: int) -> tuple[Observation, Action]:
        """The demonstrator's observation at a frame, and its next actions [K, D]."""
        return self._demos.observation(index), self._demos.chunks(np.array([index]), self._num_steps)[0]


def build_ptx(config: Config, policy: Policy, ranks: Ranks = SingleRank()) -> Ptx | None:  # noqa: B008 - no state
    """The configured second dataset; None without one. The policy notes that it is trained on it.

    One sample is tried out: what the policy can't read or can't imitate is refused before the run starts.
    """
    path = config.ptx.path
    if path is None or config.ptx.coef == 0:
        return None
    if is_prompts(config.env.suite):
        samples: ImitatedSamples = PromptedResponses(Path(path), config.ptx, config.prompts)
        trained_on = TrainingData(unknown=(path,))
    else:
        samples, trained_on = _demonstrated(config, path, policy, ranks)
    ptx = Ptx(samples, policy, config.ptx, config.run.seed)
    try:
        ptx.batch([0])
    except ValueError as error:
        raise UsageError(f"{PATH}: the policy can't imitate {path}: {error}") from error
    policy.training_data = policy.training_data.joined(trained_on)
    return ptx


def _demonstrated(
    config: Config, path: str, policy: Policy, ranks: Ranks
) -> tuple[DemonstratedDecisions, TrainingData]:
    """The demonstrations; experts play them in one process, for all ranks."""
    demos = DemoConfig(
        suites=suites_of(config.env),
        task_ids=config.env.task_ids,
        path=None if path == EXPERTS else path,
        episodes_per_task=config.ptx.episodes_per_task,
        only_successful=True if path == EXPERTS else None,
        close_high=0.0,
        release_early=0.0,
        num_workers=1 if config.env.suite in TABLETOP_SUITES else None,
    )
    source = _source(config, demos, policy)
    if isinstance(policy, SupervisedPolicy):
        refuse_other_robot(policy, source, PATH)
    if isinstance(source, RecordedSource):
        (collected,), _ = collect_demos([source], log.info)
        return DemonstratedDecisions(collected, policy.num_steps), by_demonstrations(demos, source.suite)
    played = on_each(ranks, lambda: collect_demos([source], log.info)[0] if ranks.rank == 0 else [])[0]
    return DemonstratedDecisions(played[0], policy.num_steps), by_demonstrations(demos)


def _source(config: Config, demos: DemoConfig, policy: Policy) -> DemoSource:
    size, seed = config.env.image_size or policy.image_size, config.run.seed
    if demos.path is not None:
        return open_recording(demos, demos.path, policy.num_images, PATH, size)
    cameras = cameras_of(config.env, policy.num_images)
    if config.env.suite in TABLETOP_SUITES:
        return TabletopSource(demos, demos.suites, seed, size, cameras)
    env = config.env.model_copy(update={"cameras": cameras})
    return SimulatorSource(demos, build_factory(env, config.gym, size, "sparse"), seed)
