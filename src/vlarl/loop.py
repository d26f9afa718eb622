"""The loop: tasks, rollout, rewards, advantages, update, weights to the engine, and round again.

    TaskSampler ──tasks──► Collector ──trajectories──► Reward ──scored groups──► Algorithm ──estimates──┐
        ▲                  (Engine, EnvPool)                                                            │
        │                        ▲                                                                      ▼
        └──── next iteration ────┴─────────── weights ◄──────────── Learner ◄──── TrainBatch ◄─── build_batch

This is the order in which one iteration's data goes round, in one process or on a cluster. `launch` builds the parts,
`session` writes down what happens, and `loop_async` lets rollouts run ahead of the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from vlarl.algorithms.base import Estimate
from vlarl.callbacks import Callbacks
from vlarl.config.derive import kl_estimator
from vlarl.config.schema import Config
from vlarl.config.words import counted
from vlarl.errors import VlarlError
from vlarl.evaluation.run import evaluate_policy
from vlarl.observability.clock import Stopwatch
from vlarl.rewards.safe import RewardFailureError, SafeReward
from vlarl.rollout.selection import GroupSelection
from vlarl.rollout.source import Rollouts, RolloutsAhead, RolloutsInTurn
from vlarl.rollout.statistics import reward_part_metrics, rollout_metrics, staleness_metrics
from vlarl.run.open import open_run
from vlarl.run.parts import Parts
from vlarl.run.session import RunSummary, Session
from vlarl.training.batch import build_batch
from vlarl.training.reference import reference_kl
from vlarl.training.weight_sync import evaluated_weights, publish_weights
from vlarl.types import Rollout, Task, Trajectory, TrajectoryGroup


def train(
    config: Config,
    resume: Path | None = None,
    checkpoint: Path | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
) -> RunSummary:
    """Improve a policy as configured; `resume` is the folder of an earlier run to go on with, from a checkpoint of it.

    Without `checkpoint` that is the newest one; with it, later ones are set aside.
    """
    parts, session = open_run(config, resume, checkpoint, callbacks)
    with closing(parts), session:
        if session.is_new:
            session.end_iteration(evaluate(parts, session))
        elif session.unfinished:  # an earlier session failed after the update
            evaluated = evaluate(parts, session) if session.evaluation_due else {}
            session.end_iteration(session.unfinished | evaluated)
        with rollouts(parts, session) as experience:
            while not session.finished:
                iteration = session.start_iteration()
                rollout = experience.get(iteration)
                metrics = session.record_rollout(rollout)
                metrics |= improve(parts, session, rollout)
                session.keep(metrics)
                publish_weights(parts.learner, parts.engine)
                experience.learnt(iteration)
                if session.evaluation_due:
                    with experience.resting():
                        metrics |= evaluate(parts, session)
                session.end_iteration(metrics)
    return session.summary()


def rollouts(parts: Parts, session: Session) -> Rollouts:
    """Where experience comes from: collected when it is asked for, or ahead of that, while the policy learns."""
    config = session.config
    if not config.distributed.asynchronous:
        return RolloutsInTurn(lambda iteration: collect(parts, session, iteration, session.stopwatch()))
    return RolloutsAhead(
        lambda iteration: collect(parts, session, iteration, session.stopwatch("rollout")),
        session.iterations_ahead,
        config.distributed.max_staleness,
        session.guard,
    )


def collect(parts: Parts, session: Session, iteration: int, watch: Stopwatch) -> Rollout:
    """Roll the policy out on the iteration's tasks, and on fresh ones while too few groups teach something."""
    selection = GroupSelection(session.config.rollout, parts.algorithm.has_learning_signal)
    trajectories: list[Trajectory] = []
    tasks = parts.sampler.get_batch(iteration)
    while tasks:
        with watch.timed("rollout"):
            fresh = roll_out(parts, session, tasks)
        with watch.timed("reward"):
            fresh = score(parts, session, iteration, fresh)
        trajectories += fresh
        num_missing = selection.add(group_up(fresh), len(tasks))
        tasks = parts.sampler.refill(iteration, selection.num_tried, num_missing)
    refuse_unscored(iteration, trajectories)
    parts.sampler.report_results(trajectories)
    metrics = rollout_metrics(trajectories, watch.seconds["rollout"]) | reward_part_metrics(trajectories)
    metrics |= selection.metrics() | parts.sampler.metrics()
    return Rollout(
        iteration=iteration,
        trajectories=tuple(trajectories),
        groups=tuple(selection.kept),
        metrics=metrics,
        sampler_state=parts.sampler.state(),
        curriculum=parts.sampler.describe(),
        seconds=watch.seconds,
    )


def roll_out(parts: Parts, session: Session, groups: list[list[Task]]) -> list[Trajectory]:
    """One episode of every task."""
    tasks = [task for group in groups for task in group]
    episodes = parts.collector.collect(
        tasks, session.config.rollout.temperature, on_episode=session.watch_rollout(len(tasks))
    )
    return [episode.trajectory for episode in episodes]


def score(parts: Parts, session: Session, iteration: int, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Pay for what happened; a reward that fails too often ends the run."""
    try:
        scored = parts.reward.score_all(trajectories, session.guard.check)
    except RewardFailureError as error:
        raise VlarlError(f"iteration {iteration}: {error}") from error
    if failures := sum(t.reward_error is not None for t in scored):
        session.progress.note(
            f"iteration {iteration}: the reward failed on {failures} of {counted(len(scored), 'episode')}"
        )
    return scored


def refuse_unscored(iteration: int, trajectories: Sequence[Trajectory]) -> None:
    """End the run where the reward failed on every episode: there is nothing to learn from, however few they are."""
    tried = [trajectory for trajectory in trajectories if trajectory.status != "crashed"]
    if tried and all(trajectory.reward_error is not None for trajectory in tried):
        raise VlarlError(
            f"iteration {iteration}: the reward failed on all {len(tried)} episodes. The last was "
            f"{tried[-1].task.episode_id}: {tried[-1].reward_error}. The log has the traceback of each. Fix the reward "
            "and resume."
        )


def group_up(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """Trajectories by group. One that crashed or can't be scored is missing from its group: smaller then, or gone."""
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.task.group].append(trajectory)
    remaining = ((len(tried), tuple(t for t in tried if t.status == "ok")) for _, tried in sorted(groups.items()))
    return [TrajectoryGroup(members, size - len(members)) for size, members in remaining if members]


def improve(parts: Parts, session: Session, rollout: Rollout) -> dict[str, float]:
    """Estimate advantages and let the learner take its optimizer steps, once enough rollouts are gathered."""
    iteration = rollout.iteration
    parts.learner.gathered += rollout.groups
    if not session.update_due:
        waiting = sum(len(group.trajectories) for group in parts.learner.gathered)
        return {"train/waiting_trajectories": float(waiting)}
    stale = session.config.distributed.asynchronous
    staleness = staleness_metrics(parts.learner.gathered, parts.learner.version) if stale else {}
    with session.timed("update"):
        estimates = estimate(parts, session.config)
        if not estimates:
            session.progress.note(f"iteration {iteration}: no group has episodes that differ: nothing to learn from")
            return {"train/kept_trajectories": 0.0}
        batch = build_batch(estimates, parts.policy)
        session.start_update()
        result = parts.learner.update(batch, iteration, session.progress.update, session.total_iterations)
    if result.num_optimizer_steps == 0 and result.num_skipped_steps > 0:
        session.refuse_update()
        raise VlarlError(
            f"iteration {iteration}: the loss or the gradient was not finite in any of {result.num_skipped_steps} "
            f"steps, so the weights were left alone. Lower optim.lr (now {session.config.optim.lr}) and resume."
        )
    return (
        session.record_update(result)
        | staleness
        | {
            "train/kept_trajectories": float(len(estimates)),
            "perf/train_samples_per_s": result.num_samples / session.seconds("update"),
        }
    )


def estimate(parts: Parts, config: Config) -> list[Estimate]:
    """What the decisions of all gathered groups were worth; none of them is gathered any longer."""
    groups, parts.learner.gathered = parts.learner.with_reference(parts.learner.gathered), []
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    values = parts.learner.values(trajectories) if parts.algorithm.needs_critic else None
    penalized = config.kl.coef > 0 and config.kl.place == "reward"
    ref_kl = [reference_kl(trajectory, kl_estimator(config.kl)) for trajectory in trajectories] if penalized else None
    return parts.algorithm.estimate(groups, values, ref_kl, parts.learner.kl_coef)


def evaluate(parts: Parts, session: Session) -> dict[str, float]:
    """Measure success, and the configured reward, on initial states that training never sees."""

    def on_episode(done: int) -> None:
        session.guard.check()
        session.progress.evaluating(done, len(parts.eval_tasks))

    reward = parts.reward.for_evaluation(len(parts.eval_tasks))
    with session.timed("evaluation"), evaluated_weights(parts.learner, parts.engine):
        result = evaluate_policy(
            parts.collector,
            parts.eval_tasks,
            session.config.eval.temperature,
            num_videos=session.videos_due,
            on_episode=on_episode,
            score=lambda trajectories: score_evaluated(reward, session, trajectories),
            with_images=reward.batch_size if reward.reads_images else None,
        )
        return session.record_evaluation(result)


def score_evaluated(reward: SafeReward, session: Session, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Apply the configured reward to evaluated episodes; one that fails too often ends the run here, too."""
    try:
        return reward.score_all(trajectories, session.guard.check)
    except RewardFailureError as error:
        raise VlarlError(f"evaluation after iteration {session.state.iteration}: {error}") from error
