"""From a configuration to a run: its parts, its folder and its session. What can be refused is refused here."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import torch

from vlarl.callbacks import Callbacks
from vlarl.config.derive import default_run_name
from vlarl.config.paths import located
from vlarl.config.problems import ConfigError
from vlarl.config.rules.across import check
from vlarl.config.schema import Config
from vlarl.config.source.load import to_yaml
from vlarl.config.suites import suite_label
from vlarl.config.words import counted
from vlarl.data.rollouts import drop_after, refuse_other_format
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace, Trace
from vlarl.rollout.outstanding import read_outstanding
from vlarl.run.local import launch_here
from vlarl.run.parts import Parts
from vlarl.run.preflight import refuse_unready
from vlarl.run.session import Session
from vlarl.training.checkpoint import CheckpointStore, damaged
from vlarl.training.rewind import resume_lines, set_later_aside
from vlarl.training.state import TrainerState


def launch(config: Config, directory: RunDirectory, trace: NoTrace, checkpoint: Path | None = None) -> Parts:
    """Build everything, here or on a cluster; `checkpoint` holds weights to resume from instead of `policy.path`."""
    torch.set_num_threads(config.run.num_threads or available_cores())
    if config.distributed.backend == "ray":
        from vlarl.run.cluster import launch_cluster  # loads Ray

        return launch_cluster(config, directory, trace, checkpoint)
    return launch_here(config, checkpoint)


def open_run(
    config: Config,
    resume: Path | None,
    checkpoint: Path | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
) -> tuple[Parts, Session]:
    """The parts of a run and its session: a new one, or one that resumes from a checkpoint, by default its newest."""
    if problems := check(config):  # a configuration made in Python has met the schema alone
        raise ConfigError(problems)
    refuse_unready(config, is_new=resume is None)
    with ExitStack() as stack:  # what is refused leaves nothing behind
        if resume is None:
            label = f"{suite_label(config.env)}_{config.algorithm.name}"
            root, name = config.run.root, config.run.name or default_run_name(label, config.run.seed, datetime.now())
            directory = RunDirectory.create(root, name)
            lock = stack.enter_context(directory.claim())
            stack.callback(directory.remove)
            directory.write_config(to_yaml(located(config)))
        else:
            directory = RunDirectory.open(resume)
            lock = stack.enter_context(directory.lock())
            refuse_other_format(directory.data, config.rollout.save, config.rollout.save_fps)
        is_chosen = checkpoint is not None
        checkpoint = checkpoint or CheckpointStore(directory.checkpoints, config.checkpoint.keep).latest()
        trace = stack.enter_context(Trace(directory.trace_file) if config.logging.trace else NoTrace())
        with directory.log_to_file(is_shown=True):  # until the session opens the log for good
            parts = launch(config, directory, trace, checkpoint)
        stack.callback(parts.close)
        store = parts.open_store(directory.checkpoints)
        state = store.restore(parts.learner, checkpoint) if checkpoint else TrainerState()
        opening: list[str] = []
        if resume is not None:
            if checkpoint is not None:
                _restore_rollouts(parts, state, checkpoint, config.distributed.asynchronous)
            later = set_later_aside(directory.checkpoints, checkpoint, state) if checkpoint and is_chosen else []
            opening = resume_lines(checkpoint, state.iteration, later)
            drop_after(directory.data, state.iteration)
            directory.truncate_after(state.iteration or -1, bool(state.unfinished))  # nothing trained: evaluate again
        parts.weights.publish()
        directory.write_config(to_yaml(located(config)))
        stack.pop_all()
    is_new, learner = resume is None, parts.learner
    return parts, Session(config, directory, learner, store, state, lock, trace, is_new, opening, callbacks)


def _restore_rollouts(parts: Parts, state: TrainerState, checkpoint: Path, asynchronous: bool) -> None:
    try:
        parts.sampler.restore(state.sampler)
        if parts.segments is not None:
            parts.segments.restore(state.open_episodes)
        else:
            _, outstanding = read_outstanding(state.open_episodes)  # which the loop resumes with
            if outstanding and not asynchronous:  # some of a batch are trained on, some not: it can't be taken again
                raise UsageError(
                    f"distributed.asynchronous = false: the checkpoint {checkpoint} is of an asynchronous run, and "
                    f"{counted(len(outstanding), 'episode')} of its batches were still to be run. Resume it with "
                    "--distributed.asynchronous true, or start a new run from its weights with --policy.path."
                )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(damaged(checkpoint, error)) from error
