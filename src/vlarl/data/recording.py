"""Records scripted demonstrations as an RLDS or LeRobot dataset, for `vlarl data record`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from vlarl.config.known import GYM
from vlarl.config.schema import Camera, EnvConfig, GymConfig
from vlarl.data.demos import demonstration_tasks
from vlarl.data.rlds.writer import RldsWriter
from vlarl.data.tabletop_demos import TabletopExperts
from vlarl.envs.base import Demonstration, ExpertFlaws, SuiteSpec
from vlarl.envs.build import build_factory
from vlarl.envs.process_pool import WorkerPool
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError, VlarlError
from vlarl.types import Task


class Experts(Protocol):
    """Scripted experts that play the episodes to record."""

    spec: SuiteSpec

    def demonstrate(self, tasks: Sequence[Task], flaws: ExpertFlaws) -> Iterator[Demonstration]:
        """The episodes in the order of the tasks."""
        ...


class EpisodeWriter(Protocol):
    """A new dataset that demonstrations are added to."""

    folder: Path

    def __enter__(self) -> EpisodeWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __len__(self) -> int: ...

    def add(self, episode: Demonstration) -> None:
        """Write one episode."""
        ...


@dataclass
class TaskCount:
    """Counts over the demonstrations of one task."""

    instruction: str
    num_episodes: int = 0
    num_successes: int = 0
    num_recorded_steps: int = 0


@contextmanager
def open_experts(
    suite: str, image_size: int, cameras: tuple[Camera, ...], num_envs: int, timeout_s: float = EnvConfig().timeout_s
) -> Iterator[Experts]:
    """A suite's experts, in processes of their own for simulators."""
    if suite == GYM:
        raise UsageError("--suite gym: your environment has no scripted expert; write its episodes with RldsWriter.")
    if suite in TABLETOP_SUITES:
        yield TabletopExperts(suite, image_size, cameras)
        return
    factory = build_factory(EnvConfig(suite=suite, cameras=cameras), GymConfig(), image_size, "sparse")
    with closing(WorkerPool(factory, num_envs, timeout_s)) as pool:
        yield pool


def record(
    experts: Experts,
    out: str | Path,
    task_ids: Sequence[int] | None,
    episodes_per_task: int,
    seed: int,
    flaws: ExpertFlaws,
    keep_failures: bool,
    on_episode: Callable[[Demonstration, int, int], None],
    new_dataset: Callable[[str | Path, str], EpisodeWriter] = RldsWriter,
) -> tuple[Path, dict[int, TaskCount]]:
    """Play and write the demonstrations; return the dataset's folder and the counts of each task.

    `on_episode` is called with every episode, how many are done, and the total. `new_dataset`
    opens the dataset to write, by its root and name.
    """
    tasks = demonstration_tasks(experts.spec, task_ids, episodes_per_task, seed)
    counts: dict[int, TaskCount] = {}
    with new_dataset(out, experts.spec.name) as writer:
        for done, episode in enumerate(experts.demonstrate(tasks, flaws), start=1):
            count = counts.setdefault(episode.task.task_id, TaskCount(episode.instruction))
            count.num_episodes += 1
            count.num_successes += episode.success
            if episode.success or keep_failures:
                writer.add(episode)
                count.num_recorded_steps += len(episode.actions)
            on_episode(episode, done, len(tasks))
    if not len(writer):
        raise VlarlError(
            f"none of {len(tasks)} demonstrations of {experts.spec.name} succeeded, so nothing was recorded: lower "
            "--noise and other flaws, choose other --tasks, or keep them with --keep-failures."
        )
    return writer.folder, counts
