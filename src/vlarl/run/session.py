"""The memory of a run: counters, metrics, episodes, videos, checkpoints, status and display.

The loop says what happened; the session writes it into the run directory, and knows where a resumed run continues.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from vlarl.callbacks import Callbacks, EpisodeRecord, IterationRecord
from vlarl.config.derive import world_size
from vlarl.config.paths import brief
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import resumable_checkpoints
from vlarl.config.schema import Config
from vlarl.config.secrets import public
from vlarl.config.suites import suites_of
from vlarl.config.words import counted, words_of
from vlarl.data.rollouts import TrainingEpisodes
from vlarl.errors import (
    ClusterError,
    DivergedError,
    LearnersLostError,
    RowsLostError,
    UsageError,
    VlarlError,
    WorkerFailedError,
    WorkerLostError,
    describe_error,
    excerpt,
)
from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.observability.clock import Stopwatch
from vlarl.observability.files import full_disk, is_full, write_atomically
from vlarl.observability.machine import gpu_peak_gib
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.progress import Progress
from vlarl.observability.report import write_report
from vlarl.observability.run_dir import RunDirectory, RunState
from vlarl.observability.samples import Phase, SampleRecorder, evenly_chosen, shown_prompt
from vlarl.observability.sinks import open_sinks
from vlarl.observability.trace import NoTrace
from vlarl.rollout.collector import Episode
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.rollout.statistics import evaluation_metrics
from vlarl.run.schedule import Schedule
from vlarl.training.base import Store, Trainer
from vlarl.training.best_return import BestReturn
from vlarl.training.state import TrainerState
from vlarl.types import EpisodeResult, EvalResult, Rollout, Task, UInt8Array, UpdateResult

STRIDE = 37  # from the sample that is printed to that of the next iteration, so that they are of different tasks


@dataclass(frozen=True)
class RunSummary:
    """What a run came to."""

    run_dir: Path
    success_before: float | None  # of the evaluation before the first update
    success_after: float | None  # of the newest evaluation after an update; None: there was none
    report: Path | None
    interrupted: bool


class Session:
    """Use as a context manager around the loop: however the block ends, the last whole update is saved.

    A run that fails saves as Ctrl-C does, with two exceptions. In the middle of an update the learner's weights are
    those of no iteration, and a learner that is lost can't save: then the last checkpoint stays the newest one. In all
    cases the error says which iteration the run resumes from.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        learner: Trainer,
        store: Store,
        state: TrainerState,
        lock: IO[str],
        trace: NoTrace,
        created: bool = False,
        opening: Sequence[str] = (),
        callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
    ) -> None:
        """`lock` is held and `trace` written to the end; `created`: the directory was made for this session, which
        removes it again if it can't begin; `opening`: lines to show first."""
        self.config = config
        self.schedule = Schedule(config)
        self._lock = lock
        self.trace = trace
        self._created = created
        self._opening = opening
        self.callbacks = callbacks
        self.directory = directory
        self.learner = learner
        self.state = state
        self.interrupted = False
        self.store = store
        self._resumable = replace(state)  # where the last update left the run: what a checkpoint holds
        self._saved = replace(state)  # what the newest checkpoint holds; of iteration 0 before the first
        self._updating = False  # whether the learner is, or was left, in the middle of an update
        self._best = BestReturn(
            config.checkpoint.best_return_ema_alpha,
            config.checkpoint.best_return_min_delta,
            config.checkpoint.best_return_patience,
            several_suites=len(suites_of(config.env)) > 1,
        )
        self.restart = 0  # which restart of the learners follows if they are lost; 0: none
        self._saver: TrainingEpisodes | None = None
        self._frames: dict[Task, tuple[UInt8Array, ...]] = {}  # of training episodes whose iteration is not known yet
        self._stack = ExitStack()
        self._watch = self.stopwatch()
        self._started = self._iteration_started = time.monotonic()

    def __enter__(self) -> Session:
        try:
            self._open()
        except UsageError:  # such as W&B without a login: what is refused leaves nothing behind
            if self._created:
                self.directory.remove()
            raise
        return self

    def _open(self) -> None:
        directory = self.directory
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(self.trace)
            stack.enter_context(directory.log_to_file())
            written = self.state.iteration - bool(self.unfinished)
            sinks = open_sinks(directory, self.config.logging, public(self.config), written or None)
            self.metrics = stack.enter_context(MetricLogger(sinks))
            self.recorder = stack.enter_context(EpisodeRecorder(directory))
            self.samples = stack.enter_context(SampleRecorder(directory))
            rollout = self.config.rollout
            if rollout.save != "none":
                saver = TrainingEpisodes(directory.data, rollout.save, rollout.save_fps, rollout.save_filter)
                self._saver = stack.enter_context(saver)
            self.progress = stack.enter_context(
                Progress(
                    self.schedule.total_iterations(self.state),
                    start=self.state.iteration,
                    words=words_of(self.config.env.suite),
                )
            )
            self.guard = stack.enter_context(InterruptGuard(self.progress.note))
            self._write_status("running")
            for line in self._opening:
                self.progress.note(line)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._stack:
            if error is None:
                self._write_status("finished")
            elif isinstance(error, Interrupted):
                self.progress.note("interrupted: saving")
                self._write_status("interrupted")  # first, so that it holds even if the user won't wait for the save
                try:
                    self.save_checkpoint()
                except DivergedError as diverged:
                    self._fail(diverged)
                self.interrupted = True
            elif isinstance(error, KeyboardInterrupt):
                self._write_status("interrupted", "stopped at once, after a second Ctrl-C")
            else:
                self._fail(error)
        return isinstance(error, Interrupted)

    def _fail(self, error: BaseException) -> None:
        """Save what there is to save, say that the run failed, and add to the error how the run resumes."""
        if self.restart and (lost := self._loss(error)) is not None:
            limit = self.config.distributed.restarts
            following = f"the learners are started again from the newest checkpoint (restart {self.restart} of {limit})"
            logging.getLogger(__name__).warning("%s\n%s", lost, following, exc_info=error)
            what = lost.worker if isinstance(lost, WorkerLostError) else "a part of the rollout"
            if isinstance(lost, RowsLostError):
                self._save_after(error)  # the learners are still there
            self.progress.note(f"{what} was lost: {following}")
            raise LearnersLostError(str(lost)) from error
        logging.getLogger(__name__).error("the run failed", exc_info=error)
        reason = excerpt(f"{type(error).__name__}: {error}")
        self._say_failed(reason)
        remedy = f"{self._save_after(error)}{self._resumes_from(isinstance(error, DivergedError))}"
        self._say_failed(f"{reason} {remedy}")
        if isinstance(error, SystemExit):  # of a user's callback, reward or environment
            text = f"code that the run calls {describe_error(error)}; let it return, or raise what is wrong."
            raise VlarlError(f"{text}\n{remedy}") from error
        if isinstance(error, OSError) and is_full(error):
            raise VlarlError(f"{full_disk(error.filename or self.directory.path)}\n{remedy}") from error
        if isinstance(error, VlarlError):
            kind = UsageError if isinstance(error, UsageError) else VlarlError  # others take more than a text
            raise kind(f"{error}\n{remedy}") from error
        error.add_note(remedy)

    def _loss(self, error: BaseException) -> ClusterError | None:
        """The loss of a learner, or of observations that learners train on; None where there was none.

        The others of its group raise an error when a learner is gone, since they wait for it in vain; an error of a
        learner that is the only one is its own.
        """
        if isinstance(error, RowsLostError):
            return error
        lost = _lost_learner(error)
        return None if isinstance(lost, WorkerFailedError) and world_size(self.config) == 1 else lost

    @contextmanager
    def restarting(self, lost: LearnersLostError) -> Iterator[None]:
        """Around opening the run again: if that is refused, the run has failed, and the error says why it began."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must be told what was lost before it
            text = f"{lost}\nThe learners could not be started again: {error}\n{self._resumes_from()}"
            self._say_failed(text)
            raise ClusterError(text) from error

    def _say_failed(self, message: str) -> None:
        """Write the status; the error that ended the run must not be lost over a disk that is full."""
        try:
            self._write_status("failed", message)
        except VlarlError as failure:
            logging.getLogger(__name__).error("the status could not be written", exc_info=failure)

    def _save_after(self, error: BaseException) -> str:
        """Save what the last whole update left, where that is still there; otherwise say why not."""
        if self._resumable.iteration == self._saved.iteration:
            return ""
        if self._updating:
            return "It failed in the middle of an update, so there is no newer state to save. "
        if _lost_learner(error) is not None or (isinstance(error, RowsLostError) and world_size(self.config) > 1):
            return "The learners can't save any more. "  # of several, one is left waiting for the one that missed rows
        if isinstance(error, DivergedError):
            return "The weights that diverged were not saved. "
        self.progress.note("failed: saving the last whole iteration")
        try:
            self.save_checkpoint()
        except Exception as failure:  # the error that ended the run must not be lost over one of saving
            logging.getLogger(__name__).error("the state could not be saved", exc_info=failure)
            return f"The last whole iteration, {self._resumable.iteration}, could not be saved ({failure}). "
        return ""

    def _resumes_from(self, diverged: bool = False) -> str:
        """Where a run that failed resumes, and how; what diverged may have begun to before its newest checkpoint."""
        if self._saved.iteration == 0:
            return f"There is no checkpoint yet: `{resume_command(self.directory.path)}` starts again at iteration 1."
        return (
            f"The newest checkpoint is of iteration {self._saved.iteration}, in {brief(self.directory.checkpoints)}: "
            f"resume from it with `{resume_command(self.directory.path)}`."
        ) + (self._earlier_checkpoints() if diverged else "")

    def _earlier_checkpoints(self) -> str:
        """What to do about a divergence, with the checkpoints that there are."""
        found = resumable_checkpoints(self.directory.path)
        earlier = [name for name in sorted(found, key=found.__getitem__) if 0 <= found[name] < self._saved.iteration]
        if not earlier:
            return " Lower optim.lr there."
        return (
            f" Lower optim.lr there. If it diverges again, go back to an earlier checkpoint with "
            f"`{resume_command(self.directory.path, start=earlier[-1])}`; there {'is' if len(found) == 1 else 'are'} "
            f"{', '.join(found)}."
        )

    @property
    def is_new(self) -> bool:
        """Whether no iteration has been counted yet."""
        return self.state.iteration == 0

    @property
    def unfinished(self) -> dict[str, float]:
        """The row of the iteration that an earlier session updated in and failed to finish; empty where it did not."""
        return self.state.unfinished

    def stopwatch(self, track: str = "loop") -> Stopwatch:
        """Measures what is not part of the current iteration, and puts it on the timeline."""
        return Stopwatch(self.trace, track)

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Count the block's seconds under `time/<name>` of this iteration, and put it on the timeline."""
        return self._watch.timed(name)

    def seconds(self, name: str) -> float:
        """What has been counted under this name in this iteration."""
        return self._watch.seconds[name]

    def start_iteration(self) -> int:
        """The number of the iteration that begins now; it counts once its rollout is recorded."""
        self._watch, self._iteration_started = self.stopwatch(), time.monotonic()
        return self.state.iteration + 1

    def episode_ended(self, episode: Episode) -> None:
        """Keep what was recorded of a training episode; it may be called by the thread that collects."""
        if episode.frames:
            self._frames[episode.trajectory.task] = episode.frames
        if self._saver is not None:
            self._saver.take(episode)

    def record_rollout(self, rollout: Rollout) -> dict[str, float]:
        """Note the episodes and the curriculum down, and keep the policy that earned them if none did better.

        Returns the metrics that the rollout adds to this iteration's row.
        """
        iteration, trajectories = rollout.iteration, rollout.trajectories
        self._watch.seconds |= rollout.seconds
        self.recorder.record(iteration, "rollout", trajectories)
        if self.config.checkpoint.best_return and self._best.improved(self.state, trajectories, iteration):
            returns = [t.episode_return for t in trajectories if t.status == "ok"]
            with self.timed("checkpoint"):
                self.store.save_policy("best_return", self.learner.policy, self._best_metadata(returns))
        self.state = replace(
            self.state,
            iteration=iteration,
            episodes=self.state.episodes + len(trajectories),
            env_steps=self.state.env_steps + rollout.env_steps,
            rollout_steps=rollout.env_steps,
            sampler=rollout.sampler_state,
            open_episodes=rollout.open_episodes,
        )
        if self.config.curriculum.persist:
            content = {"iteration": iteration, **rollout.curriculum}
            write_atomically(self.directory.curriculum_file, json.dumps(content, indent=2) + "\n")
        results = [EpisodeResult.of(t, t.final_observation.instruction) for t in trajectories]
        for index in evenly_chosen(len(results), self.config.logging.samples):
            results[index] = results[index].showing(shown_prompt(trajectories[index]))
        self._record_samples("rollout", results, self.config.logging.samples)
        shown = [replace(each, frames=self._frames.pop(each.task, ())) for each in results]
        self.recorder.write_training_videos(iteration, shown, several=len(suites_of(self.config.env)) > 1)
        if self._saver is not None:
            self._saver.record(iteration, trajectories)
        for result, trajectory in zip(results, trajectories, strict=True):
            self.callbacks.episode(EpisodeRecord(iteration, "rollout", result, trajectory))
        return rollout.metrics | {"rollout/total_env_steps": float(self.state.env_steps)}

    def _record_samples(self, phase: Phase, results: Sequence[EpisodeResult], count: int) -> None:
        """Keep `count` of the responses, evenly distributed, and show one of them."""
        chosen = [results[index] for index in evenly_chosen(len(results), count)]
        samples = self.samples.record(self.state.iteration, phase, chosen)
        self.metrics.show_samples(self.state.iteration, samples)
        if samples:
            self.progress.sample(samples[STRIDE * self.state.iteration % len(samples)])

    def start_update(self) -> None:
        """Note that the learner changes its weights now: until `record_update` they are those of no iteration."""
        self._updating = True

    def refuse_update(self) -> None:
        """Note that the learner took no step: its weights still are those of the last whole iteration."""
        self._updating = False

    def record_update(self, result: UpdateResult) -> dict[str, float]:
        """Count the optimizer steps; the metrics that the update adds to this iteration's row."""
        self._updating = False
        self.state = replace(self.state, optimizer_steps=self.state.optimizer_steps + result.num_optimizer_steps)
        counts = {"optimizer_steps": result.num_optimizer_steps, "skipped_steps": result.num_skipped_steps}
        return {f"train/{name}": float(value) for name, value in (result.metrics | counts).items()}

    def keep(self, metrics: dict[str, float]) -> None:
        """Note that the policy was trained on the rollout: from here on the iteration is saved if the run fails.

        `metrics` are its row so far. A resumed run makes the evaluation that is due and completes the row.
        """
        if self.schedule.update_due(self.state):
            if self._saver is not None:
                self._saver.settle()
            self._resumable = replace(self.state, unfinished=metrics)

    def _best_metadata(self, returns: Sequence[float]) -> dict[str, Any]:
        warm_up = self.config.algorithm.value_init_steps  # of the critic alone
        return {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "ema_return": self.state.ema_return,
            "current_return": sum(returns) / len(returns),
            "training_step": self.learner.version,  # updates behind the policy; a stale one's return is its elder's
            "policy_updates": max(self.learner.version - warm_up, 0),  # as Learner.update counts them
            "global_step": self.state.env_steps,
            "run_id": self.directory.name,
            "model_path": self.config.policy.path,
        }

    def record_evaluation(self, result: EvalResult) -> dict[str, float]:
        """Note an evaluation down: episodes, videos, and the metrics it adds to this iteration's row.

        Responses to prompts are also kept as samples.
        """
        iteration = self.state.iteration
        self.recorder.record(iteration, "eval", result.episodes, self.learner.version)
        self.metrics.show(iteration, self.recorder.write_videos(iteration, result.episodes))
        for episode in result.episodes:
            self.callbacks.episode(EpisodeRecord(iteration, "eval", replace(episode, frames=())))
        if result.num_crashed:
            of = counted(len(result.episodes), "evaluated episode")
            self.progress.note(f"{result.num_crashed} of {of} could not be run")
        if result.num_unscored:
            of = counted(len(result.counted), "evaluated episode")
            self.progress.note(f"the reward failed on {result.num_unscored} of {of}")
        metrics = evaluation_metrics(result)
        self.progress.evaluation(iteration, metrics, len(result.counted))
        self._record_samples("eval", result.episodes, self.schedule.num_eval_samples)
        return metrics

    def end_iteration(self, metrics: dict[str, float]) -> None:
        """Write the iteration's row, then its checkpoint if one is due: what the checkpoint counts is on disk."""
        iteration = self.state.iteration
        now = time.monotonic()
        times = self._watch.seconds | {"iteration": now - self._iteration_started, "total": now - self._started}
        row = metrics | {f"time/{name}": seconds for name, seconds in times.items()}
        if (peak := gpu_peak_gib()) is not None:
            row["perf/gpu_peak_gib"] = peak
        self.metrics.log(iteration, row)
        self.state = replace(self.state, unfinished={})
        if iteration > 0:
            self.progress.expect(self.schedule.total_iterations(self.state))
            self.progress.iteration(iteration, row)
        if self.schedule.update_due(self.state):
            self._resumable = replace(self.state)
        if self.schedule.finished(self.state):
            self._commit_episodes()
            self.store.save("final", self.learner, self.state)
            self._saved = replace(self.state)
        elif self.schedule.checkpoint_due(self._resumable, self._saved):
            self.save_checkpoint()
        self._write_status("running")
        self.callbacks.iteration(IterationRecord(iteration, row, self.directory.path))

    def save_checkpoint(self) -> None:
        """Save a periodic checkpoint of where the last update left the run.

        Rollouts that have been gathered since are not saved: they follow from the weights and the seeds, and a run that
        resumes from here collects the same ones again.
        """
        self._commit_episodes()
        self.store.save(f"step_{self._resumable.iteration:06d}", self.learner, self._resumable)
        self._saved = replace(self._resumable)

    def _commit_episodes(self) -> None:
        """Complete the datasets of saved episodes: before the checkpoint, so that none of them is missing there."""
        if self._saver is not None:
            with self.timed("checkpoint"):
                self._saver.commit()

    def summary(self) -> RunSummary:
        """What the run came to, with its report written."""
        report = write_report(self.directory.path) if self.config.logging.report else None
        rows = [row for row in self.directory.read_metrics() if "val/success_rate" in row]
        before = next((row["val/success_rate"] for row in rows if not row.get("iteration")), None)
        after = next((row["val/success_rate"] for row in reversed(rows) if row.get("iteration")), None)
        return RunSummary(self.directory.path, before, after, report, self.interrupted)

    def _write_status(self, state: RunState, message: str = "") -> None:
        self.directory.write_status(state, self.state.iteration, self.schedule.total_iterations(self.state), message)


def _lost_learner(error: BaseException | None) -> WorkerLostError | None:
    """The loss of a learner, be it behind another error."""
    while error is not None:
        if isinstance(error, WorkerLostError) and error.worker.startswith("learner"):
            return error
        error = error.__cause__ or error.__context__
    return None
