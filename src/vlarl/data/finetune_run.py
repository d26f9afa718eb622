"""The files and the display of a supervised run: metrics, checkpoints, status. What is trained is sft.py's."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import brief, located
from vlarl.config.resume_command import resume_command
from vlarl.config.run_checkpoints import PERIODIC
from vlarl.config.secrets import public
from vlarl.config.source.load import to_yaml
from vlarl.data.finetune_trainer import FinetuneTrainer
from vlarl.errors import UsageError, VlarlError, excerpt
from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.observability.files import write_atomically
from vlarl.observability.metrics import MetricLogger
from vlarl.observability.progress import Progress
from vlarl.observability.report import write_report
from vlarl.observability.run_dir import RunDirectory, RunState
from vlarl.observability.sinks import open_sinks
from vlarl.training.checkpoint import CheckpointStore, read_counters
from vlarl.training.rewind import resume_lines, set_later_aside
from vlarl.training.state import TrainerState
from vlarl.training.validation import in_words, is_exhausted

log = logging.getLogger(__name__)


class FinetuneRun:
    """Use as a context manager around a supervised run, a new one or one that resumes from `checkpoint`.

    Ctrl-C ends the block after the current step, with a checkpoint; an error says where the run resumes.
    """

    def __init__(
        self, config: FinetuneConfig, directory: RunDirectory, lock: IO[str], is_new: bool, checkpoint: Path | None
    ) -> None:
        """`lock` is held to the end; `checkpoint`: the one to resume from, by default the newest."""
        self.config, self.directory, self._lock = config, directory, lock
        self._is_new, self._is_chosen = is_new, checkpoint is not None
        checkpoint = checkpoint or CheckpointStore(directory.checkpoints, config.checkpoint.keep).latest()
        self._checkpoint = checkpoint
        self._begun = 0 if checkpoint is None else int(read_counters(checkpoint)["iteration"])
        self._saved = self._begun  # the step of the newest checkpoint
        self._row: dict[str, float] = {}  # of the current step, not yet written
        self._trainer: FinetuneTrainer | None = None
        self.progress = Progress(config.optim.steps, start=self._begun)
        self.interrupted = False
        self._status_before = ""  # of a run that is resumed
        self._stack = ExitStack()

    @property
    def _step(self) -> int:
        return self._begun if self._trainer is None else self._trainer.state.iteration

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

    def begin(self, trainer: FinetuneTrainer) -> None:
        """Restore the state of the checkpoint, if there is one, and open the metrics."""
        if self._checkpoint is not None:
            trainer.restore(self._checkpoint)
        if not self._is_new:
            later: list[str] = []
            if self._checkpoint is not None and self._is_chosen:
                state = TrainerState(iteration=self._begun)
                later = set_later_aside(self.directory.checkpoints, self._checkpoint, state)
            self.directory.truncate_after(self._begun)
            self.directory.write_config(to_yaml(located(self.config)))
            for line in resume_lines(self._checkpoint, self._begun, later, "step"):
                self.progress.note(line)
        self._trainer = trainer
        sinks = open_sinks(self.directory, self.config.logging, public(self.config), self._begun or None)
        self._metrics = self._stack.enter_context(MetricLogger(sinks))
        self._guard = self._stack.enter_context(InterruptGuard(self.progress.note))

    def log(self, step: int, row: dict[str, float]) -> None:
        """Take the metrics of the steps up to here; `after_step` writes them."""
        assert self._trainer is not None
        self._row, trained_on = dict(row), self._trainer.trained_on
        if len(trained_on.names) > 1:
            drawn = trained_on.sampler.drawn(trained_on.names, step * self.config.optim.batch_size)
            self._row |= {f"data/fraction/{one.name}": one.fraction for one in drawn}
        self.progress.training(step, self._row)

    def after_step(self) -> bool:
        """Validate, write the row and save what is due; whether training continues."""
        assert self._trainer is not None
        step, config = self._step, self.config
        is_last = step == config.optim.steps
        if config.demos.holdout and (step % config.validation.interval == 0 or is_last):
            self._validate(self._trainer)
        is_last = is_last or is_exhausted(self._trainer.state, config.validation.patience)
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
            watched = self._trainer.trained_on.watched
            self.progress.note(f"stopped: the last {config.validation.patience} validations had no lower {watched}")
        return not is_last

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: an earlier session has stopped by validation."""
        assert self._trainer is not None
        return is_exhausted(self._trainer.state, self.config.validation.patience)

    def _validate(self, trainer: FinetuneTrainer) -> None:
        if (row := trainer.validate()) is None:
            return
        self._row |= row
        self.progress.note(f"validation after step {self._step}: {in_words(row)}")

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
                except VlarlError as failure:  # diverged weights, or a rank that was lost
                    self._fail(failure)
            elif isinstance(error, KeyboardInterrupt):
                self._write_status("interrupted", "stopped at once")
            else:
                self._fail(error)
        return isinstance(error, Interrupted)

    def _save(self) -> None:
        if self._trainer is None or self._saved == self._step:
            return
        self._trainer.save(f"{PERIODIC}{self._step:06d}")
        self._saved = self._step

    def _fail(self, error: BaseException) -> None:
        """Say that the run failed, and how it resumes; a resume that is refused changes nothing."""
        if self._status_before and self._trainer is None and isinstance(error, UsageError):
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
