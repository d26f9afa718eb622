"""`vlarl finetune`: the command line of supervised training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlarl.cli.configured import (
    FINETUNE_PRESET,
    help_page,
    parse_request,
    print_dry_run,
    refuse_from,
    resumed_run,
    with_name,
)
from vlarl.cli.resume import nothing_left_to_imitate
from vlarl.cli.run_lines import log_lines, opening_lines
from vlarl.config.derive import derive_finetune, derived_lines
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.paths import brief
from vlarl.config.resume_command import resume_command
from vlarl.config.source.load import load_config
from vlarl.config.source.start import Start, start_of
from vlarl.config.words import agreement_in_words
from vlarl.observability.run_dir import RunDirectory
from vlarl.run.preflight import refuse_early, refuse_missing, refuse_unready

if TYPE_CHECKING:
    from vlarl.run.finetune import FinetuneSummary


def _supervised(config: FinetuneConfig, resume: Path | None, checkpoint: Path | None) -> FinetuneSummary:
    from vlarl.run.finetune import finetune

    return finetune(config, resume, checkpoint)


def finetune(
    arguments: Sequence[str],
    run_training: Callable[[FinetuneConfig, Path | None, Path | None], FinetuneSummary] = _supervised,
) -> int:
    """`vlarl finetune`: make a base policy from demonstrations, or a reward model from labels."""
    request = parse_request(arguments, FinetuneConfig, trains=False)
    if request.wants_help:
        print(help_page("finetune", FINETUNE_PRESET))
        return 0
    run_dir: Path | None = None
    checkpoint: Path | None = None
    start: Start | None = None
    if request.resume is not None:
        config, run_dir, checkpoint = resumed_run(request, FinetuneConfig)
        message = nothing_left_to_imitate(run_dir, checkpoint, config, list(request.flags.spelled.values()))
        if message is not None and not request.dry_run:
            print(message)
            return 0
    else:
        refuse_from(request)
        is_named = request.source is not None
        start = start_of(request.source, {}) if is_named else Start(FINETUNE_PRESET, "which is the default")
        config = load_config(start.source, request.flags, schema=FinetuneConfig)
    if request.dry_run:
        refuse_early(config, is_new=run_dir is None)
        head = [f"resumes {brief(str(run_dir))}"] if start is None else start.lines
        print_dry_run(config, head, derived_lines(derive_finetune(config)))
        return 0
    if start is not None:
        config = with_name(config, start)
    refuse_missing(config, is_new=run_dir is None)
    folder = run_dir or Path(config.run.root) / str(config.run.name)
    print("\n".join(opening_lines(config, folder, start)), flush=True)
    refuse_unready(config, is_new=run_dir is None)
    summary = run_training(config, run_dir, checkpoint)
    lines = _closing_lines(summary)
    print("\n".join(lines))
    log_lines(RunDirectory(summary.run_dir), lines)
    return 130 if summary.interrupted else 0


def _closing_lines(summary: FinetuneSummary) -> list[str]:
    """Losses, what was measured, and the paths of the results."""
    lines = [f"loss: {summary.first_loss:.3f} → {summary.last_loss:.3f}"]
    if summary.demo_success is not None:
        lines.append(f"demonstrations that succeed: {summary.demo_success:.1%}")
    if summary.agreement:
        lines.append(f"agreement with held-out labels: {agreement_in_words(summary.agreement)}")
    lines.append(f"checkpoint: {brief(summary.checkpoint)}")
    if summary.best_l1 is not None:
        best = brief(summary.checkpoint.parent / "best_validation")
        lines.append(f"lowest L1 on held-out episodes: {summary.best_l1:.4f}, after step {summary.best_step}: {best}")
    if summary.report is not None:
        lines.append(f"report: {brief(summary.report)}")
    if summary.interrupted:
        lines.append(f"interrupted and saved; resume with: {resume_command(summary.run_dir)}")
    return lines
