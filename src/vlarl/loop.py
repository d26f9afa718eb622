"""The loop: tasks, rollout, rewards, advantages, update, weights to the engine, and round again.

    TaskSampler ──tasks──► Collector ──trajectories──► Reward ──scored──► build_batch ──► Learner.annotate ──┐
        ▲                  (Engine, EnvPool)                                                                 │
        │                        ▲                                                                           ▼
        └──── next iteration ────┴──── weights ◄──── Learner.update ◄──── TrainBatch ◄──── Algorithm.estimate

This is the order in which one iteration's data goes round, in one process or on a cluster. `run/open.py` builds the
parts, `run/session.py` writes down what happens, and `rollout/ahead.py` lets rollouts run ahead of the update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vlarl.callbacks import Callbacks
from vlarl.config.derive import kl_estimator
from vlarl.config.schema import Config
from vlarl.config.words import counted
from vlarl.decisions import TrainBatch
from vlarl.errors import ClusterError, LearnersLostError, UsageError, VlarlError
from vlarl.evaluation.run import evaluate_policy, without_images
from vlarl.export.merge import merge_final
from vlarl.observability.clock import Stopwatch
from vlarl.rewards.safe import RewardFailureError, SafeReward
from vlarl.rollout.ahead import Calls, Check, RolloutsAhead
from vlarl.rollout.outstanding import Delivery, OutstandingGroups
from vlarl.rollout.sampling import evaluation_sampling, rollout_sampling
from vlarl.rollout.segments import Segments
from vlarl.rollout.selection import GroupRule, GroupSelection
from vlarl.rollout.source import RolloutsInTurn, RolloutSource
from vlarl.rollout.statistics import busy_metrics, reward_part_metrics, rollout_metrics, staleness_metrics
from vlarl.run.open import open_run
from vlarl.run.parts import Parts, recording_plan
from vlarl.run.session import RunSummary, Session
from vlarl.training.annotate import last_inputs, last_observations, reference_kl, values_by_trajectory
from vlarl.training.batch import build_batch, with_estimates
from vlarl.types import EpisodeResult, EvalResult, Rollout, Task, Trajectory

log = logging.getLogger(__name__)

REOPENING_PAUSES_S = (5.0, 15.0)
MOST_WITH_IMAGES = 256
"""Evaluated episodes whose images wait for the reward, which may take any number at once."""


def train(
    config: Config,
    resume: Path | None = None,
    checkpoint: Path | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
) -> RunSummary:
    """Improve a policy as configured; `resume` is the folder of an earlier run to continue, from a checkpoint of it.

    Without `checkpoint` that is the newest one; with it, later ones are set aside. Learners that are lost are started
    again `distributed.restarts` times: the run is opened again as it would be to resume it.
    """
    parts, session = open_run(config, resume, checkpoint, callbacks)
    for number in range(1, config.distributed.restarts + 1):
        session.restart = number
        try:
            return run(parts, session)
        except LearnersLostError as lost:
            with session.restarting(lost):
                parts, session = reopened(config, session.directory.path, callbacks)
    return run(parts, session)


def reopened(config: Config, folder: Path, callbacks: Callbacks) -> tuple[Parts, Session]:
    """Open a run again whose learners were lost; for some seconds the cluster may still name a machine that is gone."""
    for pause_s in REOPENING_PAUSES_S:
        try:
            return open_run(config, folder, None, callbacks)
        except (ClusterError, UsageError) as error:  # the latter: it names a machine's CPUs that it never gives out
            log.warning("the run could not be opened again, which is tried once more in %g s: %s", pause_s, error)
            time.sleep(pause_s)
    return open_run(config, folder, None, callbacks)


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
                del kept, gathered  # rows that have been trained on would keep the stores full in the next rollout
                session.keep(metrics)
                metrics |= parts.weights.publish()
                source.updated()
                if schedule.evaluation_due(session.state):
                    with source.paused():
                        metrics |= evaluate(parts, session)
                session.end_iteration(metrics)
    summary = session.summary()
    if session.config.checkpoint.merge and not session.interrupted:
        merge_final(session.directory.checkpoints)
    return summary


def rollouts(parts: Parts, session: Session) -> RolloutSource:
    """Where rollouts come from: collected in turn with the update, or ahead of it while the policy is trained."""
    if session.config.distributed.asynchronous:
        return rollouts_ahead(parts, session)
    return RolloutsInTurn(lambda iteration: collect(parts, session, iteration, session.stopwatch()))


def rollouts_ahead(parts: Parts, session: Session) -> RolloutSource:
    """Rollouts in a stream, which begin with the groups that were outstanding when the run was saved."""
    config, state = session.config, session.state
    rule = GroupRule(config.rollout, parts.algorithm.has_learning_signal)
    left = session.schedule.iterations_left(state)
    groups = OutstandingGroups(config.rollout, rule, config.distributed.max_staleness, left, state.iteration + 1)
    first_tasks = groups.restore(state.open_episodes)
    reward = parts.reward.judged_over(config.rollout.num_groups * config.rollout.group_size)

    def score_next(trajectories: list[Trajectory], check: Check) -> list[Trajectory]:
        return score(reward, session, session.state.iteration + 1, trajectories, check)

    def report(iteration: int, delivery: Delivery, seconds: dict[str, float]) -> Rollout:
        refuse_unscored(iteration, delivery.trajectories)
        metrics = rollout_metrics(delivery.trajectories, seconds["rollout"]) | delivery.metrics
        rollout = report_rollout(parts, iteration, seconds, delivery.trajectories, delivery.kept, metrics)
        return replace(rollout, open_episodes=delivery.outstanding)

    calls = Calls(
        score_next, report, lambda done, total: session.progress.rollout(done, total, "groups"), session.episode_ended
    )
    sampling = rollout_sampling(config.rollout)
    return RolloutsAhead(
        groups,
        parts.collector,
        parts.sampler,
        sampling,
        calls,
        session.guard,
        session.stopwatch,
        first_tasks,
        recording_plan(config),
    )


def collect(parts: Parts, session: Session, iteration: int, watch: Stopwatch) -> Rollout:
    """The iteration's experience: whole episodes of groups, or a segment of a fixed length in each slot."""
    pool = parts.collector.pool
    busy_before, counts_before = pool.busy_s, parts.pass_counts()
    if parts.segments is not None:
        rollout = collect_segments(parts, parts.segments, session, iteration, watch)
    else:
        rollout = collect_groups(parts, session, iteration, watch)
    busy = busy_metrics(busy_before, pool.busy_s, watch.seconds["rollout"], pool.num_envs)
    return replace(rollout, metrics={**rollout.metrics, **busy, **parts.pass_counts().since(counts_before)})


def collect_groups(parts: Parts, session: Session, iteration: int, watch: Stopwatch) -> Rollout:
    """Roll the policy out on the iteration's tasks, and on new ones while too few groups have a learning signal."""
    rule = GroupRule(session.config.rollout, parts.algorithm.has_learning_signal)
    selection = GroupSelection(session.config.rollout, rule)
    trajectories: list[Trajectory] = []
    tasks = parts.sampler.get_batch(iteration)
    while tasks:
        with watch.timed("rollout"):
            collected = roll_out(parts, session, tasks)
        with watch.timed("reward"):
            collected = score(parts.reward, session, iteration, collected, session.guard.check)
        num_missing = selection.add(collected)
        kept = {id(trajectory) for trajectory in selection.kept}
        trajectories += [each if id(each) in kept else each.without_inputs() for each in collected]
        tasks = parts.sampler.refill(iteration, selection.num_tried, num_missing)
    refuse_unscored(iteration, trajectories)
    metrics = rollout_metrics(trajectories, watch.seconds["rollout"]) | selection.metrics()
    return report_rollout(parts, iteration, watch.seconds, trajectories, selection.kept, metrics)


def collect_segments(parts: Parts, segments: Segments, session: Session, iteration: int, watch: Stopwatch) -> Rollout:
    """Roll the policy out for so many steps in each slot. Only episodes that ended in them are reported."""

    def check() -> None:
        session.guard.check()
        session.progress.rollout(*segments.progress, "decisions")

    with watch.timed("rollout"):
        collected = segments.collect(rollout_sampling(session.config.rollout), check, session.episode_ended)
    with watch.timed("reward"):
        collected = score(parts.reward, session, iteration, collected, session.guard.check)
    refuse_unscored(iteration, collected)
    segments.credit(collected)
    ended = [trajectory for trajectory in collected if not trajectory.continues]
    kept = [trajectory for trajectory in collected if trajectory.status == "ok"]
    metrics = rollout_metrics(ended, watch.seconds["rollout"], collected)
    metrics["rollout/restarted_episodes"] = float(segments.num_restarted)
    rollout = report_rollout(parts, iteration, watch.seconds, collected, kept, metrics)
    return replace(rollout, open_episodes=segments.state())


def report_rollout(
    parts: Parts,
    iteration: int,
    seconds: dict[str, float],
    collected: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    metrics: dict[str, float],
) -> Rollout:
    """Report the episodes that ended to the sampler: the rollout, with what the next one depends on."""
    ended = [trajectory for trajectory in collected if not trajectory.continues]
    parts.sampler.report_results(ended)
    return Rollout(
        iteration=iteration,
        trajectories=tuple(ended),
        kept=tuple(kept),
        metrics=metrics | reward_part_metrics(ended) | parts.sampler.metrics(),
        sampler_state=parts.sampler.state(),
        curriculum=parts.sampler.describe(),
        seconds=seconds,
        env_steps=sum(trajectory.length for trajectory in collected),
    )


def roll_out(parts: Parts, session: Session, tasks: list[Task]) -> list[Trajectory]:
    """One episode of every task, in the order of the tasks."""
    ended: dict[int, Trajectory] = {}
    sampling = rollout_sampling(session.config.rollout)
    plan = recording_plan(session.config)
    for index, episode in parts.collector.episodes(tasks, sampling, plan, session.guard.check):
        session.episode_ended(episode)
        ended[index] = episode.trajectory
        session.progress.rollout(len(ended), len(tasks))
    return [ended[index] for index in range(len(tasks))]


def score(
    reward: SafeReward, session: Session, iteration: int, trajectories: list[Trajectory], check: Check
) -> list[Trajectory]:
    """Assign the rewards; a reward that fails too often ends the run."""
    try:
        scored = reward.score_all(trajectories, check)
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
    staleness = check_staleness(parts, session, gathered)
    present = parts.readable(gathered)
    lost = {"train/lost_trajectories": float(len(gathered) - len(present))} if len(present) < len(gathered) else {}
    if lost:
        missing = counted(len(gathered) - len(present), "episode")
        session.progress.note(f"iteration {iteration}: {missing} of {len(gathered)} lost with a machine of the cluster")
    trajectories = parts.algorithm.with_learning_signal(present)
    if not trajectories:
        session.progress.note(f"iteration {iteration}: no group has episodes that differ: nothing to learn from")
        return {"train/kept_trajectories": 0.0} | lost
    with session.timed("update"):
        parts.make_way()
        batch = estimated_batch(parts, session.config, trajectories, iteration)
        session.start_update()
        total = session.schedule.total_iterations(session.state)
        result = parts.learner.update(batch, iteration, session.progress.update, total)
        parts.make_way()
    if result.num_optimizer_steps == 0 and result.num_skipped_steps > 0:
        session.refuse_update()
        raise VlarlError(
            f"iteration {iteration}: the loss or the gradient was not finite in any of {result.num_skipped_steps} "
            f"steps, so the weights were left alone. Lower optim.lr (now {session.config.optim.lr}) and resume."
        )
    return (
        session.record_update(result)
        | staleness
        | lost
        | {
            "train/kept_trajectories": float(len(trajectories)),
            "perf/train_samples_per_s": result.num_samples / session.seconds("update"),
        }
    )


def check_staleness(parts: Parts, session: Session, gathered: Sequence[Trajectory]) -> dict[str, float]:
    """How old the decisions are, in an asynchronous run. One that is too old is a defect: it must not be trained on."""
    config = session.config.distributed
    if not config.asynchronous:
        return {}
    staleness = staleness_metrics(gathered, parts.learner.version)
    if (oldest := staleness.get("train/staleness_max", 0.0)) > config.max_staleness:
        raise RuntimeError(
            f"iteration {session.state.iteration}: a decision is {oldest:.0f} updates old, and "
            f"distributed.max_staleness is {config.max_staleness}. This is a defect of vlarl; please report it."
        )
    return staleness


def estimated_batch(parts: Parts, config: Config, trajectories: Sequence[Trajectory], iteration: int) -> TrainBatch:
    """The decisions of all trajectories as a batch, with the learner's annotations and the advantages."""
    batch, last, values, ref_kl = build_batch(trajectories), None, None, None
    if parts.algorithm.needs_critic and (cut_off := last_observations(trajectories)):
        last = last_inputs(parts.policy, [trajectories[index].final_observation for index in cut_off])
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
            unscored[index] = trajectory.without_inputs() if reward.reads_images else without_images(trajectory)
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
