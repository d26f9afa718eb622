"""Evaluation: success on fixed initial states that training never sees. Used by the loop and by `vlarl eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from vlarl.config.schema import Camera, EnvConfig, PolicyConfig
from vlarl.envs.build import build_pool
from vlarl.errors import UsageError
from vlarl.launch import check_fit, choose_device
from vlarl.observability.run_dir import RunDirectory, check_writable
from vlarl.policies import load_configured
from vlarl.rollout.collector import Collector, Episode
from vlarl.rollout.engine import Engine
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.rollout.regression_engine import RegressionEngine
from vlarl.rollout.tasks import evaluation_tasks
from vlarl.rollout.torch_engine import TorchEngine
from vlarl.types import EpisodeResult, EvalResult, Task

CAMERAS: tuple[Camera, ...] = ("agent", "wrist")  # in the order that policies read them


def evaluate_policy(
    collector: Collector,
    tasks: Sequence[Task],
    temperature: float,
    num_filmed: int = 0,
    on_episode: Callable[[int], None] = lambda done: None,
) -> EvalResult:
    """Run every task once and film some of them, spread over the tasks."""
    film = spread(len(tasks), num_filmed)
    episodes = collector.collect(tasks, temperature, film, on_episode)
    instructions = {task.task_id: task.instruction for task in collector.pool.spec.tasks}
    return EvalResult(tuple(_result(episode, instructions) for episode in episodes))


def spread(num_tasks: int, num_filmed: int) -> frozenset[int]:
    """Places of the filmed episodes, evenly over the list."""
    count = min(num_filmed, num_tasks)
    return frozenset(i * num_tasks // count for i in range(count)) if count else frozenset()


def _result(episode: Episode, instructions: dict[int, str]) -> EpisodeResult:
    trajectory = episode.trajectory
    return EpisodeResult(
        task=trajectory.task,
        instruction=instructions[trajectory.task.task_id],
        success=trajectory.success,
        length=trajectory.length,
        episode_return=trajectory.env_return,
        frames=episode.frames,
    )


def evaluate(
    checkpoint: str | Path,
    suite: str = "tabletop_spatial",
    task_ids: Sequence[int] | None = None,
    states_per_task: int = 20,
    temperature: float = 0.0,
    num_envs: int = 64,
    videos: int = 0,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    on_episode: Callable[[int], None] = lambda done: None,
    policy_config: PolicyConfig = PolicyConfig(),  # noqa: B008 - frozen
) -> EvalResult:
    """Evaluate a checkpoint on a suite's unseen initial states; episodes and films go to the new folder `out`.

    `policy_config` says how it is loaded; its path is not read. With its `actions` l1 the regression head acts.
    """
    if out is not None:
        refuse_existing(Path(out))
    chosen = choose_device(device)
    policy = load_configured(policy_config, checkpoint, chosen, policy_config.decoder, policy_config.actions)
    policy.use_statistics(policy_config.unnorm_key, suite)
    env = EnvConfig(suite=suite, cameras=CAMERAS[: policy.num_images])
    pool = build_pool(env, num_envs, policy.image_size, "sparse")
    tasks = evaluation_tasks(pool.spec, task_ids, states_per_task, seed)
    check_fit(policy, pool, tasks[0])
    policy.eval()
    engine: Engine = RegressionEngine(policy, chosen) if policy.acts_by_regression else TorchEngine(policy, chosen)
    collector = Collector(pool, policy, engine)
    result = evaluate_policy(collector, tasks, temperature, videos, on_episode)
    if out is not None:
        write_evaluation(result, Path(out))
    return result


def refuse_existing(folder: Path) -> None:
    """Refuse a folder for results that is there already, before hours of episodes are run for it."""
    if folder.exists():
        raise UsageError(f"{folder} exists already, and results are never overwritten: name a new folder.")
    check_writable(folder.parent, "name a folder you can write to")


def write_evaluation(result: EvalResult, folder: Path) -> None:
    """Write episodes.jsonl and the films into a new folder."""
    refuse_existing(folder)
    try:
        (folder / "videos").mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder} ({error.strerror}): name a folder you can write to.") from error
    with EpisodeRecorder(RunDirectory(folder)) as recorder:
        recorder.record(0, "eval", result.episodes)
        recorder.film_episodes(0, result.episodes)


def results_folder(checkpoint: str | Path) -> Path | None:
    """Where results of a run's checkpoint belong: a new folder in the run's `eval`; None for any other checkpoint."""
    run = Path(checkpoint).resolve().parent.parent
    return run / "eval" / f"{datetime.now():%Y%m%d_%H%M%S}" if (run / "status.json").is_file() else None
