"""Sources of demonstrations: the tabletop's experts, those of simulators, or recordings.

    tabletop_* ── tabletop_demos.py, all episodes of a task at once ──────────────┐
    libero_*, metaworld_* ── WorkerPool.demonstrate, a process for each episode ──┼─► DemoSet
    demos.path, demos.mixture ── rlds/demos.py or lerobot/demos.py, recorded ─────┘

Opening a source checks its configuration; `collect` then plays or reads the episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Protocol, get_args

from vlarl.config.dataset_folder import Format, dataset_folders, find_recording
from vlarl.config.finetune import DemoConfig
from vlarl.config.schema import Camera, EnvConfig, GymConfig
from vlarl.config.words import counted
from vlarl.data.demo_set import DemoSet, from_demonstrations
from vlarl.data.lerobot.demos import LeRobotSource
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.tabletop_demos import TABLETOP, generate_demos
from vlarl.envs.base import Demonstration, EnvFactory, ExpertFlaws, SuiteSpec
from vlarl.envs.build import build_factory
from vlarl.envs.process_pool import WorkerPool
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

    def demonstrate(self, tasks: Sequence[Task], flaws: ExpertFlaws) -> Iterator[Demonstration]:
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
        flaws = tabletop_flaws(config)
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


def tabletop_flaws(config: DemoConfig) -> ExpertFlaws:
    """The flaws of the tabletop's experts, who fail on purpose unless configured otherwise."""
    high = 0.35 if config.close_high is None else config.close_high
    early = 0.55 if config.release_early is None else config.release_early
    return ExpertFlaws(high, early, config.action_noise)


def simulator_flaws(config: DemoConfig, suite: str) -> ExpertFlaws:
    """The flaws of a simulator's experts. Those of LIBERO fail on purpose if that is configured, others never do."""
    high, early = (config.close_high or 0.0, config.release_early or 0.0) if suite.startswith("libero") else (0.0, 0.0)
    return ExpertFlaws(high, early, config.action_noise, config.hesitation)


class SimulatorSource:
    """A simulator's scripted experts, each in a process of its own."""

    def __init__(self, config: DemoConfig, factory: EnvFactory, seed: int) -> None:
        spec = factory.spec
        self.name, self.action_dim, self.proprio_dim = spec.name, spec.action_dim, spec.proprio_dim
        flaws = simulator_flaws(config, self.name)
        fails_on_purpose = bool(flaws.close_high or flaws.release_early)
        self.only_successful = not fails_on_purpose if config.only_successful is None else config.only_successful
        self._flaws, self._factory = flaws, factory
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
            return from_demonstrations(self.name, play_tasks(pool, self._tasks, self._flaws, note))


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
    experts: Demonstrators, tasks: Sequence[Task], flaws: ExpertFlaws, note: Note
) -> Iterator[Demonstration]:
    """Demonstrations as they are played, with a note on the success of each task."""
    episodes = experts.demonstrate(tasks, flaws)
    for task_id, of_task in groupby(episodes, key=lambda episode: episode.task.task_id):
        won: list[bool] = []
        instruction = ""
        for episode in of_task:
            won.append(episode.success)
            instruction = episode.instruction
            yield episode
        note(f"{experts.spec.name} task {task_id}: {sum(won)} of {len(won)} succeed ({instruction})")


SOURCES: dict[Format, type[RldsSource] | type[LeRobotSource]] = {"rlds": RldsSource, "lerobot": LeRobotSource}
ONLY: dict[Format, tuple[str, ...]] = {"rlds": ("split", "damaged"), "lerobot": ("dataset_name", "gripper")}


def open_recording(
    config: DemoConfig, path: str, num_images: int, option: str = "demos.path", image_size: int = 224
) -> RecordedSource:
    """Recorded episodes of either format; `option` names the path in messages."""
    _refuse_ineffective(config, [Path(path)])
    return _recording(config, Path(path), num_images, option, image_size)


def _recording(config: DemoConfig, folder: Path, num_images: int, option: str, image_size: int) -> RecordedSource:
    kind, _ = find_recording(folder)
    return SOURCES[kind](config, str(folder), num_images, option, image_size)


def _refuse_ineffective(config: DemoConfig, folders: Sequence[Path]) -> None:
    """Refuse options of a format that none of the folders has."""
    kinds = {find_recording(folder)[0] for folder in folders}
    titles: dict[Format, str] = {"rlds": "RLDS", "lerobot": "LeRobot"}
    for kind, names in ONLY.items():
        changed = [f"demos.{name}" for name in names if getattr(config, name) != getattr(DemoConfig(), name)]
        if changed and kind not in kinds:
            raise UsageError(
                f"{', '.join(changed)}: {', '.join(map(str, folders))} is not in the format {titles[kind]}, and this "
                "has an effect on datasets in it alone: leave it out."
            )


def open_sources(config: DemoConfig, seed: int, image_size: int, num_images: int) -> list[DemoSource]:
    """The configured sources, for a policy that reads `num_images` views of this size."""
    if config.path is not None:
        option = "demos.mixture" if config.mixture else "demos.path"
        folders = dataset_folders(config)
        _refuse_ineffective(config, folders)
        recorded = [_recording(config, folder, num_images, option, image_size) for folder in folders]
        names = [source.name for source in recorded]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise UsageError(
                f"demos.mixture: several of its datasets have the name {twice[0]}, and each needs statistics of its "
                "own: leave out all but one."
            )
        return list(recorded)
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


def refuse_mixed_sizes(policy: SupervisedPolicy, sources: Sequence[DemoSource]) -> None:
    """Refuse datasets whose frames differ in size, for a policy that reads them as they were recorded."""
    recorded = [source for source in sources if isinstance(source, RecordedSource)]
    if policy.keeps_frame_size and len({source.frame_size for source in recorded}) > 1:
        sizes = ", ".join(f"{source.name} {source.frame_size[1]} x {source.frame_size[0]}" for source in recorded)
        raise UsageError(
            f"demos.mixture: its datasets have frames of different sizes ({sizes}), and this policy reads them as they "
            "were recorded; name datasets of one size, or record them again in one."
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
