"""Destinations of metrics: metrics.jsonl always, TensorBoard and Weights & Biases on request. Libraries load on use."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from vlarl.config.schema import SinksConfig
from vlarl.config.secrets import masked
from vlarl.errors import MissingExtraError, UsageError
from vlarl.observability.files import disk_errors
from vlarl.observability.metrics import Sink
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.samples import Sample
from vlarl.observability.video import Video

SHOWN_SAMPLES = 32  # at most, of each iteration and of each evaluation, in TensorBoard and W&B
TABLE = ("prompt", "images", "response", "solution", "reward", "reward_parts", "success", "length", "truncated")
PREFIXES = {"rollout": "rollout", "eval": "val"}  # of the names under which samples of each phase are shown
LOGIN = (
    "set the environment variable WANDB_API_KEY to your account's key, or run `wandb login`, or keep its files here "
    "with `--logging.wandb_mode offline`."
)
EVALUATED = "val/iteration"  # x axis of evaluations in W&B


class JsonlSink:
    """Appends one JSON object a row, a whole line at a time, so that the file can be tailed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append a row; a value that is not finite becomes null, which every JSON reader understands."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row = {"iteration": iteration, "time": round(time.time(), 3), **values}
        with disk_errors(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def show(self, iteration: int, videos: Sequence[Video]) -> None:
        """Do nothing: videos are in the run's folder already."""

    def show_samples(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Do nothing: samples are in samples.jsonl already."""

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._file.close()


class TensorBoardSink:
    """Writes TensorBoard scalars, videos as animated images, and samples as text."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """On resume, TensorBoard hides what an earlier session wrote after iteration `resume_after`."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        purge_step = None if resume_after is None else resume_after + 1
        with disk_errors(folder):
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write one point for each metric."""
        with disk_errors(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, iteration)

    def show(self, iteration: int, videos: Sequence[Video]) -> None:
        """Add each video as an animated GIF under the tab Images; its own video format needs another package."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer: Any = self._writer.file_writer  # SummaryWriter writes its own summaries with it
        with disk_errors(self._folder):
            for video in videos:
                content, (width, height) = video.as_gif()
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
                name = f"val/videos/{_episode(video)}"
                summary = Summary(value=[Summary.Value(tag=name, image=image)])
                writer.add_summary(summary, iteration)

    def show_samples(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Add samples under the tab Text."""
        with disk_errors(self._folder):
            text = "\n\n---\n\n".join(_as_markdown(sample) for sample in samples[:SHOWN_SAMPLES])
            self._writer.add_text(f"{PREFIXES[samples[0].phase]}/samples", text, iteration)

    def close(self) -> None:
        """Flush and close."""
        with disk_errors(self._folder):
            self._writer.close()


class WandbSink:
    """Logs to Weights & Biases; a resumed run keeps its id, which is stored in the run directory."""

    def __init__(
        self,
        run_dir: Path,
        project: str,
        name: str,
        entity: str | None = None,
        group: str | None = None,
        mode: Literal["online", "offline"] = "online",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._run_dir = run_dir
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        try:
            with _masked_arguments():
                self._run = wandb.init(
                    dir=str(run_dir),
                    project=project,
                    name=name,
                    entity=entity,
                    group=group,
                    mode=mode,
                    config=dict(config or {}),
                    id=_stable_id(run_dir),
                    resume="allow",
                    # W&B's own lines and its capture of the terminal would garble the live display.
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases did not start ({error}): {LOGIN}") from error
        # An iteration, not W&B's own counter, is the x axis: after a resume W&B refuses steps it has seen already.
        # Evaluations have their own axis, so that their curves are not interrupted at iterations without one.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self._run.define_metric(EVALUATED)
        self._run.define_metric("val/*", step_metric=EVALUATED)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        evaluated = {EVALUATED: iteration} if any(name.startswith("val/") for name in metrics) else {}
        self._run.log({"iteration": iteration, **evaluated, **metrics})

    def show(self, iteration: int, videos: Sequence[Video]) -> None:
        """Log the videos, and the last frame of each as an image. One that W&B refuses must not fail the run."""
        import wandb

        try:
            self._run.log(
                {
                    "iteration": iteration,
                    EVALUATED: iteration,
                    "val/videos": [wandb.Video(str(v.path), caption=v.caption, format="mp4") for v in videos],
                    "val/last_frames": [wandb.Image(v.last_frame, caption=v.caption) for v in videos],
                }
            )
        except (wandb.Error, ValueError, OSError) as error:
            logging.getLogger(__name__).warning("Weights & Biases did not take the videos: %s", error)

    def show_samples(self, iteration: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table. One that W&B refuses must not fail the run."""
        import wandb

        phase = samples[0].phase
        table = wandb.Table(columns=["iteration", *TABLE])
        try:
            for sample in samples[:SHOWN_SAMPLES]:
                images = [wandb.Image(str(self._run_dir / name)) for name in sample.images]
                table.add_data(iteration, *(images if name == "images" else _cell(sample, name) for name in TABLE))
            axis = {EVALUATED: iteration} if phase == "eval" else {}
            self._run.log({"iteration": iteration, **axis, f"{PREFIXES[phase]}/samples": table})
        except (wandb.Error, ValueError, OSError) as error:
            logging.getLogger(__name__).warning("Weights & Biases did not take the samples: %s", error)

    def close(self) -> None:
        """Finish the W&B run; an unreachable server must not fail a finished run."""
        try:
            self._run.finish()
        except Exception as error:
            logging.getLogger(__name__).warning("Weights & Biases did not finish cleanly: %s", error)


def open_sinks(
    run: RunDirectory, options: SinksConfig, config: Mapping[str, Any], resume_after: int | None
) -> list[Sink]:
    """The configured destinations of a run's metrics. W&B gets `config`; `resume_after`: see TensorBoardSink."""
    sinks: list[Sink] = [JsonlSink(run.metrics_file)]
    if options.tensorboard:
        sinks.append(TensorBoardSink(run.tensorboard, resume_after=resume_after))
    if options.wandb:
        sinks.append(
            WandbSink(
                run.path,
                options.wandb_project,
                run.name,
                options.wandb_entity,
                options.wandb_group,
                options.wandb_mode,
                config,
            )
        )
    return sinks


def refuse_without_login() -> None:
    """Refuse W&B's online mode without a login, before anything is loaded: W&B itself waits for a key to be typed."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UsageError(f"logging.wandb: there is no login of Weights & Biases on this machine: {LOGIN}")


def _cell(sample: Sample, name: str) -> Any:
    value = getattr(sample, name)
    return json.dumps(dict(value)) if isinstance(value, Mapping) else value


def _as_markdown(sample: Sample) -> str:
    """A sample for TensorBoard; texts of the policy are code blocks, in which nothing is markup."""
    solution = "" if sample.solution is None else f"solution:\n\n{_as_code(sample.solution)}\n\n"
    prompt, response = _as_code(sample.prompt), _as_code(sample.response)
    return f"prompt:\n\n{prompt}\n\nresponse ({sample.summary}):\n\n{response}\n\n{solution}"


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _episode(video: Video) -> str:
    """`task03_state31`: an episode has the same name in every iteration, so that TensorBoard shows it on one slider."""
    return re.sub(r"^iter_\d+_|_[a-z]+$", "", video.path.stem)


@contextmanager
def _masked_arguments() -> Iterator[None]:
    """Hide secrets of the command line, which W&B sends to its server, while it starts."""
    arguments, sys.argv = sys.argv, [masked(argument) for argument in sys.argv]
    try:
        yield
    finally:
        sys.argv = arguments


def _stable_id(run_dir: Path) -> str:
    path = run_dir / "wandb" / "run_id"
    with disk_errors(path):
        if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
            return known
        path.parent.mkdir(exist_ok=True)
        fresh = uuid.uuid4().hex[:12]
        path.write_text(fresh + "\n", encoding="utf-8")
    return fresh
