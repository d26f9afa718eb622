"""Sources of demonstrations: the tabletop's experts, those of simulators, or recordings.

    tabletop_* ── tabletop_demos.py, all episodes of a task at once ──────────────┐
    libero_*, metaworld_* ── WorkerPool.demonstrate, a process for each episode ──┼─► DemoSet
    demos.path ── rlds/demos.py, recorded episodes ───────────────────────────────┘

Opening a source checks its configuration; `collect` then plays or reads the episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import Protocol, get_args

from vlarl.config.finetune import DemoConfig
from vlarl.config.schema import Camera, EnvConfig, GymConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet, from_demonstrations
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.tabletop_demos import TABLETOP, generate_demos
from vlarl.envs.base import Demonstration, EnvFactory, SuiteSpec
from vlarl.envs.build import build_factory
from vlarl.envs.process_pool import WorkerPool
from vlarl.envs.tabletop.expert import ExpertFlaws
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError, VlarlError
from vlarl.observability.capacity import check_memory_for_envs, default_processes
from vlarl.observability.machine import available_cores
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.rollout.tasks import chosen_task_ids, derive_seed
from vlarl.types import Task

_DEMONSTRATION = 3  # keeps these seeds different from those of rollout/tasks.py

Note = Callable[[str], None]


class DemoSource(Protocol):
    """A source of demonstrations under one name."""

    name: str
    action_dim: int
    proprio_dim: int
    only_successful: bool

    def collect(self, note: Note) -> DemoSet:
        """All its demonstrations, including failed ones; reports its progress by `note`."""
        ...


class Demonstrators(Protocol):
    """Experts that play whole episodes: a `WorkerPool`."""

    spec: SuiteSpec

    def demonstrate(
        self, tasks: Sequence[Task], action_noise: float, hesitation: float = 0.0
    ) -> Iterator[Demonstration]:
        """The episodes in the order of the tasks."""
        ...


class TabletopSource:
    """The tabletop's scripted experts, with the configured flaws."""

    def __init__(
        self, config: DemoConfig, suites: Sequence[str], seed: int, image_size: int, cameras: Sequence[Camera]
    ) -> None:
        spec = TABLETOP_SUITES[suites[0]].spec
        self.name, self.action_dim, self.proprio_dim = TABLETOP, spec.action_dim, spec.proprio_dim
        self.only_successful = bool(config.only_successful)
        self._config, self._suites, self._seed = config, suites, seed
        self._image_size, self._cameras = image_size, cameras

    def collect(self, note: Note) -> DemoSet:
        """Play all tasks, many episodes at once."""
        note("playing demonstrations of the tabletop")
        config = self._config
        flaws = ExpertFlaws(config.close_high, config.release_early, config.action_noise)
        workers = config.num_workers or available_cores()
        return generate_demos(
            self._suites,
            config.episodes_per_task,
            self._seed,
            flaws,
            self._image_size,
            self._cameras,
            workers,
            config.task_ids,
        )


class SimulatorSource:
    """A simulator's scripted experts, each in a process of its own."""

    def __init__(self, config: DemoConfig, factory: EnvFactory, seed: int) -> None:
        spec = factory.spec
        self.name, self.action_dim, self.proprio_dim = spec.name, spec.action_dim, spec.proprio_dim
        self.only_successful = config.only_successful is not False
        self._config, self._factory = config, factory
        self._tasks = demonstration_tasks(spec, config.task_ids, config.episodes_per_task, seed)
        self._num_workers = min(config.num_workers or default_processes(self.name), len(self._tasks))
        if config.num_workers is not None:
            check_memory_for_envs(self.name, self._num_workers, "demos.num_workers")

    def collect(self, note: Note) -> DemoSet:
        """Play all tasks, a process for each episode."""
        workers = self._num_workers
        count = counted(len(self._tasks), "demonstration")
        note(f"playing {count} of {self.name} in {counted(workers, 'process')}")
        with closing(WorkerPool(self._factory, workers)) as pool:
            return from_demonstrations(self.name, play_tasks(pool, self._tasks, self._config, note))


def demonstration_tasks(
    spec: SuiteSpec, task_ids: Sequence[int] | None, episodes_per_task: int, seed: int
) -> list[Task]:
    """Episodes to demonstrate, never from initial states of evaluation, each with its own seed."""
    return [
        Task(
            spec.name,
            task_id,
            demonstrated_state(spec, episode),
            derive_seed(seed, _DEMONSTRATION, task_id, episode),
        )
        for task_id in chosen_task_ids(spec, task_ids)
        for episode in range(episodes_per_task)
    ]


def demonstrated_state(spec: SuiteSpec, episode: int) -> int:
    """A state that is used neither for training nor for evaluation, where the suite has such; else a training state."""
    if spec.first_fresh_state is not None:
        return spec.first_fresh_state + episode
    return spec.train_states[episode % len(spec.train_states)]


def play_tasks(
    experts: Demonstrators, tasks: Sequence[Task], config: DemoConfig, note: Note
) -> Iterator[Demonstration]:
    """Demonstrations as they are played, with a note on the success of each task."""
    episodes = experts.demonstrate(tasks, config.action_noise, config.hesitation)
    for task_id, of_task in groupby(episodes, key=lambda episode: episode.task.task_id):
        won: list[bool] = []
        instruction = ""
        for episode in of_task:
            won.append(episode.success)
            instruction = episode.instruction
            yield episode
        note(f"{experts.spec.name} task {task_id}: {sum(won)} of {len(won)} succeed ({instruction})")


def open_sources(config: DemoConfig, seed: int, image_size: int, num_images: int) -> list[DemoSource]:
    """The configured sources, for a policy that reads `num_images` views of this size."""
    if config.path is not None:
        return [RldsSource(config, config.path, num_images)]
    cameras: tuple[Camera, ...] = get_args(Camera)[:num_images]
    tabletop = [suite for suite in config.suites if suite in TABLETOP_SUITES]
    sources: list[DemoSource] = []
    if tabletop:
        sources.append(TabletopSource(config, tabletop, seed, image_size, cameras))
    for suite in config.suites:
        if suite not in TABLETOP_SUITES:
            env = EnvConfig(suite=suite, cameras=cameras)
            sources.append(SimulatorSource(config, build_factory(env, GymConfig(), image_size, "sparse"), seed))
    return sources


def refuse_other_robot(policy: SupervisedPolicy, source: DemoSource, option: str = "demos") -> None:
    """Refuse demonstrations, which an option or section names, of a robot that the policy can't control."""
    has = f"{policy.action_dim} action dimensions"
    wants = f"{source.action_dim} action dimensions"
    if policy.proprio_dim is not None:
        has += f" and {policy.proprio_dim} of the robot's state"
        wants += f" and {source.proprio_dim} of the robot's state"
    if has != wants:
        raise UsageError(
            f"{option}: the policy has {has}, the demonstrations of {source.name} have {wants}; name suites of one "
            "robot, and a checkpoint made for it."
        )


def collect_demos(sources: Iterable[DemoSource], note: Note) -> tuple[list[DemoSet], float]:
    """The demonstrations to imitate from all sources, and the fraction of all of them that reached their goal."""
    kept: list[DemoSet] = []
    num_won = num_episodes = 0
    for source in sources:
        demos = source.collect(note)
        num_won += int(demos.success.sum())
        num_episodes += len(demos.success)
        note(f"{demos.name}: {len(demos):,} frames, {demos.success.mean():.1%} of {len(demos.success):,} succeed")
        if source.only_successful:
            if not demos.success.any():
                raise VlarlError(
                    f"none of {len(demos.success)} demonstrations of {demos.name} succeeded, so there is nothing to "
                    "imitate: lower demos.action_noise, or choose other tasks with demos.task_ids"
                )
            demos = demos.successful()
        kept.append(demos)
    return kept, num_won / num_episodes
