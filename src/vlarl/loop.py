"""The loop: tasks, rollout, rewards, advantages, update, weights to the engine, and round again.

    TaskSampler ──tasks──► Collector ──trajectories──► Reward ──scored groups──► Algorithm ──estimates──┐
        ▲                  (Engine, EnvPool)                                                            │
        │                        ▲                                                                      ▼
        └──── next iteration ────┴─────────── weights ◄──────────── Learner ◄──── TrainBatch ◄─── build_batch

Everything runs in one process, in this order. `launch` builds the parts, `session` writes down what happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vlarl.config.schema import Config
from vlarl.errors import VlarlError
from vlarl.evaluation import evaluate_policy
from vlarl.launch import Parts, open_run
from vlarl.rollout.statistics import rollout_metrics
from vlarl.session import RunSummary, Session
from vlarl.training.batching import build_batch
from vlarl.training.weight_sync import publish_weights
from vlarl.types import Trajectory, TrajectoryGroup


def train(config: Config, resume: Path | None = None) -> RunSummary:
    """Improve a policy as configured; `resume` is the directory of an earlier run to go on with."""
    parts, session = open_run(config, resume)
    with closing(parts.pool), session:
        if session.is_new:
            session.end_iteration(evaluate(parts, session))
        while not session.finished:
            iteration = session.start_iteration()
            trajectories, metrics = collect(parts, session, iteration)
            metrics |= improve(parts, session, iteration, group_up(trajectories))
            publish_weights(parts.learner, parts.engine)
            if session.evaluation_due:
                metrics |= evaluate(parts, session)
            session.end_iteration(metrics)
    return session.summary()


def collect(parts: Parts, session: Session, iteration: int) -> tuple[list[Trajectory], dict[str, float]]:
    """Roll the policy out on the iteration's tasks and score what happened."""
    tasks = [task for group in parts.sampler.groups(iteration) for task in group]
    with session.timed("rollout"):
        episodes = parts.collector.collect(
            tasks, session.config.rollout.temperature, on_episode=session.watch_rollout(len(tasks))
        )
    trajectories = [parts.reward.score(e.trajectory) if e.trajectory.status == "ok" else e.trajectory for e in episodes]
    session.record_rollout(iteration, trajectories)
    return trajectories, rollout_metrics(trajectories, session.seconds("rollout"))


def group_up(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """Trajectories by group. A crashed one is missing from its group, which is smaller then, or gone."""
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.status == "ok":
            groups[trajectory.task.group].append(trajectory)
    return [TrajectoryGroup(tuple(members)) for _, members in sorted(groups.items())]


def improve(parts: Parts, session: Session, iteration: int, groups: list[TrajectoryGroup]) -> dict[str, float]:
    """Estimate advantages and let the learner take its optimizer steps."""
    with session.timed("update"):
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        values = parts.learner.values(trajectories) if parts.algorithm.needs_critic else None
        estimates = parts.algorithm.estimate(groups, values)
        if not estimates:
            session.progress.note(f"iteration {iteration}: each group's episodes ended alike: nothing to learn from")
            return {"train/kept_trajectories": 0.0}
        batch = build_batch(estimates, parts.policy)
        result = parts.learner.update(batch, iteration, session.progress.update)
    if result.num_optimizer_steps == 0 and result.num_skipped_steps > 0:
        raise VlarlError(
            f"iteration {iteration}: the gradient was not finite in any of {result.num_skipped_steps} steps, so the "
            f"weights were left alone. Lower optim.lr (now {session.config.optim.lr}) and go on with "
            f"`{session.directory.resume_command}`."
        )
    return session.record_update(result) | {
        "train/kept_trajectories": float(len(estimates)),
        "perf/train_samples_per_s": result.num_samples / session.seconds("update"),
    }


def evaluate(parts: Parts, session: Session) -> dict[str, float]:
    """Measure success on initial states that training never sees."""
    with session.timed("evaluation"):
        result = evaluate_policy(
            parts.collector,
            parts.eval_tasks,
            session.config.eval.temperature,
            num_filmed=session.films_due,
            on_episode=lambda done: session.progress.evaluating(done, len(parts.eval_tasks)),
        )
        return session.record_evaluation(result)
