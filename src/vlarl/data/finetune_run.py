"""The files and the display of a supervised run: metrics, checkpoints, status. What is trained is sft.py's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import brief, located
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import FINAL, PERIODIC
from vlarl.config.secrets import public
from vlarl.config.source.load import to_yaml
from vlarl.data.mixtures import MixtureSampler
from vlarl.errors import DivergedError, UsageError, VlarlError, excerpt
from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.observability.files import write_atomically
from vlarl.observability.machine import gpu_peak_gib
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.progress import Progress
from vlarl.observability.report import write_report
from vlarl.observability.run_dir import RunDirectory, RunState
from vlarl.observability.sinks import open_sinks
from vlarl.policies.load import DTYPES
from vlarl.training.checkpoint import CheckpointStore, read_counters
from vlarl.training.rewind import resume_lines, set_later_aside
from vlarl.training.sft import Imitation, ImitationState
from vlarl.training.sft_checkpoint import refuse_diverged, restore_imitation, save_imitation
from vlarl.training.state import TrainerState
from vlarl.training.validation import Validates, is_best, is_exhausted

log = logging.getLogger(__name__)

BEST = "best_validation"  # checkpoint of the policy with the lowest error on held-out episodes


class FinetuneRun:
    """Use as a context manager around a supervised run, a new one or one that resumes from `checkpoint`.

    Ctrl-C ends the block after the current step, with a checkpoint; an error says where the run resumes.
    """

    def __init__(
        self, config: FinetuneConfig, directory: RunDirectory, lock: IO[str], is_new: bool, checkpoint: Path | None
    ) -> None:
        """`lock` is held to the end; `checkpoint`: the one to resume from, by default the newest."""
        self.config, self.directory, self._lock = config, directory, lock
        options = config.checkpoint
        self._store = CheckpointStore(directory.checkpoints, options.keep, max_total_gib=options.max_total_gib)
        self._is_new, self._is_chosen = is_new, checkpoint is not None
        self._checkpoint = checkpoint = checkpoint or self._store.latest()
        self._dtype = DTYPES[config.optim.save_dtype]
        self._begun = 0 if checkpoint is None else int(read_counters(checkpoint)["iteration"])
        self._saved = self._begun  # the step of the newest checkpoint
        self._row: dict[str, float] = {}  # of the current step, not yet written
        self._imitation: Imitation | None = None
        self._frames: Mapping[str, int] = {}
        self.progress = Progress(config.optim.steps, start=self._begun)
        self.interrupted = False
        self._status_before = ""  # of a run that is resumed
        self._stack = ExitStack()

    @property
    def _step(self) -> int:
        return self._begun if self._imitation is None else self._imitation.state.iteration

    def __enter__(self) -> FinetuneRun:
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(self.directory.log_to_file())
            stack.enter_context(self.progress)
            if self.directory.status_file.is_file():
                self._status_before = self.directory.status_file.read_text(encoding="utf-8")
            self._write_status("running")
            self._stack = stack.pop_all()
        return self

    def begin(
        self, imitation: Imitation, sampler: MixtureSampler, names: list[str], validation: Validates | None
    ) -> None:
        """Restore the state of the checkpoint, if there is one, and open the metrics."""
        self._frames = dict(zip(names, sampler.sizes, strict=True))
        self._sampler, self._names, self._validation = sampler, names, validation
        if self._checkpoint is not None:
            restore_imitation(self._store, self._checkpoint, imitation, self._frames, self.config.run.seed)
        if not self._is_new:
            later: list[str] = []
            if self._checkpoint is not None and self._is_chosen:
                state = TrainerState(iteration=self._begun)
                later = set_later_aside(self.directory.checkpoints, self._checkpoint, state)
            self.directory.truncate_after(self._begun)
            self.directory.write_config(to_yaml(located(self.config)))
            for line in resume_lines(self._checkpoint, self._begun, later, "step"):
                self.progress.note(line)
        self._imitation = imitation
        sinks = open_sinks(self.directory, self.config.logging, public(self.config), self._begun or None)
        self._metrics = self._stack.enter_context(MetricLogger(sinks))
        self._guard = self._stack.enter_context(InterruptGuard(self.progress.note))

    def log(self, step: int, row: dict[str, float]) -> None:
        """Take the metrics of the steps up to here; `after_step` writes them."""
        self._row = dict(row)
        if len(self._names) > 1:
            drawn = self._sampler.drawn(self._names, step * self.config.optim.batch_size)
            self._row |= {f"data/fraction/{one.name}": one.fraction for one in drawn}
        if (peak := gpu_peak_gib()) is not None:
            self._row["perf/gpu_peak_gib"] = peak
        self.progress.training(step, self._row)

    def after_step(self) -> bool:
        """Validate, write the row and save what is due; whether training continues."""
        assert self._imitation is not None
        step, config, state = self._step, self.config, self._imitation.state
        is_last = step == config.optim.steps
        if self._validation is not None and (step % config.validation.interval == 0 or is_last):
            self._validate(self._validation, state)
        is_last = is_last or is_exhausted(state, config.validation.patience)
        if self._row:
            self._metrics.log(step, self._row)
            self._row = {}
            self._write_status("running")
        interval = config.checkpoint.interval
        if interval and (step % interval == 0 or is_last):
            self._save()
        if not is_last:
            self._guard.check()
        elif step < config.optim.steps:
            watched = "" if self._validation is None else self._validation.watched
            self.progress.note(f"stopped: the last {config.validation.patience} validations had no lower {watched}")
        return not is_last

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: an earlier session has stopped by validation."""
        assert self._imitation is not None
        return is_exhausted(self._imitation.state, self.config.validation.patience)

    def _validate(self, validation: Validates, state: ImitationState) -> None:
        row = validation.measure()
        self._row |= row
        self.progress.note(f"validation after step {self._step}: {validation.in_words(row)}")
        if is_best(state, row[validation.watched]):
            note = {"training_step": self._step, **row}
            self._store.save_policy(BEST, validation.policy, note, self._dtype)

    def finish(self) -> Path:
        """Write the final policy; returns its folder."""
        assert self._imitation is not None
        state = self._imitation.state
        refuse_diverged(self._imitation, self.directory.checkpoints)
        note = {"training_step": state.iteration, "loss": state.last_loss}
        return self._store.save_policy(FINAL, self._imitation.policy, note, self._dtype)

    def report(self) -> Path | None:
        """Write the report, if that is wanted."""
        return write_report(self.directory.path) if self.config.logging.report else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._stack:
            if error is None:
                self._write_status("finished")
            elif isinstance(error, Interrupted):
                self.progress.note("interrupted: saving")
                self._write_status("interrupted")  # first, so that it holds even if the user won't wait for the save
                self.interrupted = True
                try:
                    self._save()
                except DivergedError as diverged:
                    self._fail(diverged)
            elif isinstance(error, KeyboardInterrupt):
                self._write_status("interrupted", "stopped at once")
            else:
                self._fail(error)
        return isinstance(error, Interrupted)

    def _save(self) -> None:
        if self._imitation is None or self._saved == self._step:
            return
        name = f"{PERIODIC}{self._step:06d}"
        save_imitation(self._store, name, self._imitation, self._frames, self._dtype)
        self._saved = self._step

    def _fail(self, error: BaseException) -> None:
        """Say that the run failed, and how it resumes; a resume that is refused changes nothing."""
        if self._status_before and self._imitation is None and isinstance(error, UsageError):
            write_atomically(self.directory.status_file, self._status_before)
            return
        log.error("the run failed", exc_info=error)
        command = resume_command(self.directory.path)
        remedy = f"There is no checkpoint yet: `{command}` starts again at step 1."
        if self._saved:
            where = brief(self.directory.checkpoints)
            remedy = f"The newest checkpoint is of step {self._saved}, in {where}: resume from it with `{command}`."
        self._write_status("failed", f"{excerpt(f'{type(error).__name__}: {error}')} {remedy}")
        if isinstance(error, VlarlError):
            kind_of = UsageError if isinstance(error, UsageError) else VlarlError  # others take more than a text
            raise kind_of(f"{error}\n{remedy}") from error
        error.add_note(remedy)

    def _write_status(self, state: RunState, message: str = "") -> None:
        self.directory.write_status(state, self._step, self.config.optim.steps, message)
