"""The loop: tasks, rollout, rewards, advantages, update, weights to the engine, and round again.

    TaskSampler ──tasks──► Collector ──trajectories──► Reward ──scored──► build_batch ──► Learner.annotate ──┐
        ▲                  (Engine, EnvPool)                                                                 │
        │                        ▲                                                                           ▼
        └──── next iteration ────┴──── weights ◄──── Learner.update ◄──── TrainBatch ◄──── Algorithm.estimate

This is the order in which one iteration's data goes round, in one process or on a cluster. `run/open.py` builds the
parts, `run/session.py` writes down what happens, and `rollout/source.py` lets rollouts run ahead of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vlarl.callbacks import Callbacks
from vlarl.config.derive import kl_estimator
from vlarl.config.schema import Config
from vlarl.config.words import counted
from vlarl.decisions import TrainBatch
from vlarl.errors import VlarlError
from vlarl.evaluation.run import evaluate_policy, without_images
from vlarl.observability.clock import Stopwatch
from vlarl.rewards.safe import RewardFailureError, SafeReward
from vlarl.rollout.sampling import evaluation_sampling, rollout_sampling
from vlarl.rollout.selection import GroupSelection
from vlarl.rollout.source import RolloutsAhead, RolloutsInTurn, RolloutSource
from vlarl.rollout.statistics import reward_part_metrics, rollout_metrics, staleness_metrics
from vlarl.run.open import open_run
from vlarl.run.parts import Parts
from vlarl.run.session import RunSummary, Session
from vlarl.training.annotate import last_observations, reference_kl, values_by_trajectory
from vlarl.training.batch import build_batch, with_estimates
from vlarl.types import EpisodeResult, EvalResult, Rollout, Task, Trajectory

MOST_WITH_IMAGES = 256
"""Evaluated episodes whose images wait for the reward, which may take any number at once."""


def train(
    config: Config,
    resume: Path | None = None,
    checkpoint: Path | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
) -> RunSummary:
    """Improve a policy as configured; `resume` is the folder of an earlier run to continue, from a checkpoint of it.

    Without `checkpoint` that is the newest one; with it, later ones are set aside.
    """
    return run(*open_run(config, resume, checkpoint, callbacks))


def run(parts: Parts, session: Session) -> RunSummary:
    """Evaluate, then collect and improve until the run is finished."""
    schedule = session.schedule
    with closing(parts), session:
        if session.is_new:
            session.end_iteration(evaluate(parts, session))
        elif session.unfinished:  # an earlier session failed after the update
            evaluated = evaluate(parts, session) if schedule.evaluation_due(session.state) else {}
            session.end_iteration(session.unfinished | evaluated)
        with rollouts(parts, session) as source:
            while not schedule.finished(session.state):
                rollout = source.get(session.start_iteration())
                metrics = session.record_rollout(rollout)
                update_due = schedule.update_due(session.state)
                kept = tuple(trajectory.without_images() for trajectory in rollout.kept)
                gathered = source.gather(replace(rollout, kept=kept), update_due)
                del rollout  # its images have been reported: from here on they would only take memory
                if update_due:
                    metrics |= improve(parts, session, gathered)
                else:
                    metrics["train/waiting_trajectories"] = float(source.num_waiting)
                session.keep(metrics)
                parts.weights.publish()
                source.updated()
                if schedule.evaluation_due(session.state):
                    with source.paused():
                        metrics |= evaluate(parts, session)
                session.end_iteration(metrics)
    return session.summary()


def rollouts(parts: Parts, session: Session) -> RolloutSource:
    """Where rollouts come from: collected in turn with the update, or ahead of it while the policy is trained."""
    config = session.config
    if not config.distributed.asynchronous:
        return RolloutsInTurn(lambda iteration: collect(parts, session, iteration, session.stopwatch()))
    return RolloutsAhead(
        lambda iteration: collect(parts, session, iteration, session.stopwatch("rollout")),
        session.schedule.iterations_left(session.state),
        config.distributed.max_staleness,
        session.guard,
    )


def collect(parts: Parts, session: Session, iteration: int, watch: Stopwatch) -> Rollout:
    """Roll the policy out on the iteration's tasks, and on new ones while too few groups have a learning signal."""
    selection = GroupSelection(session.config.rollout, parts.algorithm.has_learning_signal)
    trajectories: list[Trajectory] = []
    tasks = parts.sampler.get_batch(iteration)
    while tasks:
        with watch.timed("rollout"):
            collected = roll_out(parts, session, tasks)
        with watch.timed("reward"):
            collected = score(parts, session, iteration, collected)
        trajectories += collected
        num_missing = selection.add(collected)
        tasks = parts.sampler.refill(iteration, selection.num_tried, num_missing)
    refuse_unscored(iteration, trajectories)
    parts.sampler.report_results(trajectories)
    metrics = rollout_metrics(trajectories, watch.seconds["rollout"]) | reward_part_metrics(trajectories)
    metrics |= selection.metrics() | parts.sampler.metrics()
    return Rollout(
        iteration=iteration,
        trajectories=tuple(trajectories),
        kept=tuple(selection.kept),
        metrics=metrics,
        sampler_state=parts.sampler.state(),
        curriculum=parts.sampler.describe(),
        seconds=watch.seconds,
    )


def roll_out(parts: Parts, session: Session, tasks: list[Task]) -> list[Trajectory]:
    """One episode of every task, in the order of the tasks."""
    ended: dict[int, Trajectory] = {}
    sampling = rollout_sampling(session.config.rollout)
    for index, episode in parts.collector.episodes(tasks, sampling, check=session.guard.check):
        ended[index] = episode.trajectory
        session.progress.rollout(len(ended), len(tasks))
    return [ended[index] for index in range(len(tasks))]


def score(parts: Parts, session: Session, iteration: int, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Assign the rewards; a reward that fails too often ends the run."""
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
    """End the run where the reward failed on every episode: there is nothing to train on, however few they are."""
    tried = [trajectory for trajectory in trajectories if trajectory.status != "crashed"]
    if tried and all(trajectory.reward_error is not None for trajectory in tried):
        raise VlarlError(
            f"iteration {iteration}: the reward failed on all {len(tried)} episodes. The last was "
            f"{tried[-1].task.episode_id}: {tried[-1].reward_error}. The log has the traceback of each. Fix the reward "
            "and resume."
        )


def improve(parts: Parts, session: Session, gathered: Sequence[Trajectory]) -> dict[str, float]:
    """Estimate advantages and let the learner take its optimizer steps."""
    iteration = session.state.iteration
    stale = session.config.distributed.asynchronous
    staleness = staleness_metrics(gathered, parts.learner.version) if stale else {}
    trajectories = parts.algorithm.with_learning_signal(gathered)
    if not trajectories:
        session.progress.note(f"iteration {iteration}: no group has episodes that differ: nothing to learn from")
        return {"train/kept_trajectories": 0.0}
    with session.timed("update"):
        batch = estimated_batch(parts, session.config, trajectories, iteration)
        session.start_update()
        total = session.schedule.total_iterations(session.state)
        result = parts.learner.update(batch, iteration, session.progress.update, total)
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
            "train/kept_trajectories": float(len(trajectories)),
            "perf/train_samples_per_s": result.num_samples / session.seconds("update"),
        }
    )


def estimated_batch(parts: Parts, config: Config, trajectories: Sequence[Trajectory], iteration: int) -> TrainBatch:
    """The decisions of all trajectories as a batch, with the learner's annotations and the advantages."""
    batch, last, values, ref_kl = build_batch(trajectories), None, None, None
    if parts.algorithm.needs_critic and (cut_off := last_observations(trajectories)):
        last = parts.policy.process([trajectories[index].final_observation for index in cut_off])
    found = parts.learner.annotate(batch, iteration, last)
    batch = found.onto(batch, config)
    if parts.algorithm.needs_critic:
        values = values_by_trajectory(batch, trajectories, found.last_values)
    if config.kl.coef > 0 and config.kl.place == "reward":
        ref_kl = reference_kl(batch, trajectories, kl_estimator(config.kl))
    estimates = parts.algorithm.estimate(trajectories, values, ref_kl, parts.learner.kl_coef)
    return with_estimates(batch, trajectories, estimates, parts.algorithm.level)


def evaluate(parts: Parts, session: Session) -> dict[str, float]:
    """Measure success, and the configured reward, on initial states that training never sees."""
    tasks, num_videos = parts.eval_tasks, session.schedule.num_videos(session.state)
    reward = parts.reward.for_evaluation(len(tasks))
    results: dict[int, EpisodeResult] = {}
    unscored: dict[int, Trajectory] = {}  # with their images only where the reward reads them: those take memory
    sampling = evaluation_sampling(session.config.rollout, session.config.eval.temperature)
    with session.timed("evaluation"), parts.weights.for_evaluation():
        episodes = evaluate_policy(
            parts.collector, tasks, sampling, num_videos, session.guard.check, session.schedule.num_eval_samples
        )
        for index, result, trajectory in episodes:
            results[index] = result
            unscored[index] = trajectory if reward.reads_images else without_images(trajectory)
            if reward.reads_images and len(unscored) == min(reward.batch_size, MOST_WITH_IMAGES):
                results |= score_evaluated(reward, session, results, unscored)
                unscored.clear()
            session.progress.evaluating(len(results), len(tasks))
        if unscored:
            results |= score_evaluated(reward, session, results, unscored)
        return session.record_evaluation(EvalResult(tuple(results[index] for index in range(len(tasks)))))


def score_evaluated(
    reward: SafeReward, session: Session, results: dict[int, EpisodeResult], unscored: dict[int, Trajectory]
) -> dict[int, EpisodeResult]:
    """The results of the unscored episodes with the configured reward; one that fails too often ends the run."""
    indices = sorted(unscored)
    try:
        scored = reward.score_all([unscored[index] for index in indices], session.guard.check)
    except RewardFailureError as error:
        raise VlarlError(f"evaluation after iteration {session.state.iteration}: {error}") from error
    return {
        index: replace(
            results[index],
            episode_return=each.env_return,
            reward_error=each.reward_error,
            reward_parts=each.reward_parts,
        )
        for index, each in zip(indices, scored, strict=True)
    }
