"""The report's section of samples: prompts, images and what the policy wrote, before and after training."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vlarl.config.words import counted
from vlarl.observability.report.data import RunData, is_inside
from vlarl.observability.samples import Sample, evenly_chosen

MAX_PROMPTS = 12
MAX_TRAINING = 8
MAX_TEXT = 3000  # characters of a text that are shown
MAX_IMAGE_BYTES = 8 * 2**20  # of all images: a report should open quickly and fit into a mail

Pair = tuple[Sample | None, Sample | None]


def samples_body(data: RunData) -> tuple[str, str]:
    """Lead and body: some prompts with their responses before and after training, and the newest ones of training."""
    pairs = sample_pairs(data.samples)
    chosen = [pairs[index] for index in evenly_chosen(len(pairs), MAX_PROMPTS)]
    training = _newest_of_training(data.samples)
    if not chosen and not training:
        return "No response was kept (<code>logging.samples</code>).", ""
    images = _Images(data.run.path)
    cards = "".join(_card(pair, images) for pair in chosen)
    body = f'<div class="samples">{cards}</div>' if cards else ""
    if training:
        rows = "".join(_card((None, sample), images) for sample in training)
        title = f"{counted(len(training), 'response')} of iteration {training[0].iteration}, sampled for training"
        body += f'<details><summary>{title}</summary><div class="samples">{rows}</div></details>'
    before_only = "" if any(after for _, after in chosen) or not chosen else " There is no later evaluation yet."
    of = f"{len(chosen)} of the {len(pairs)} evaluated prompts in <code>samples.jsonl</code>" if chosen else "Responses"
    return f"{of}, with what the policy wrote before and after training.{before_only}", body


def sample_pairs(samples: Sequence[Sample]) -> list[Pair]:
    """Evaluated samples of the same prompt before training and at the end, in the order of task and prompt."""
    evaluated = [sample for sample in samples if sample.phase == "eval"]
    last = max((sample.iteration for sample in evaluated), default=0)
    before = {(s.task_id, s.init_state): s for s in evaluated if s.iteration == 0}
    after = {(s.task_id, s.init_state): s for s in evaluated if s.iteration == last and last > 0}
    return [(before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]


def _newest_of_training(samples: Sequence[Sample]) -> list[Sample]:
    trained = [sample for sample in samples if sample.phase == "rollout"]
    last = max((sample.iteration for sample in trained), default=0)
    return [sample for sample in trained if sample.iteration == last][:MAX_TRAINING]


class _Images:
    """The images of a run as HTML, as far as they fit into one page."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._used = 0

    def html(self, names: Sequence[str]) -> str:
        return "".join(self._one(self._run / name) for name in names)

    def _one(self, path: Path) -> str:
        kind = {".png": "png", ".jpg": "jpeg"}.get(path.suffix)
        if kind is None or not is_inside(path, self._run):
            return ""
        self._used += path.stat().st_size
        if self._used > MAX_IMAGE_BYTES:
            return ""
        content = base64.b64encode(path.read_bytes()).decode("ascii")
        return f'<img alt="image of the prompt" src="data:image/{kind};base64,{content}">'


def _card(pair: Pair, images: _Images) -> str:
    before, after = pair
    shown = after or before
    assert shown is not None
    shots = images.html(shown.images)
    solution = "" if shown.solution is None else f'<p class="solution">solution: {_text(shown.solution)}</p>'
    trained = shown.phase == "rollout"
    sides = _side("sampled", after) if trained else _side("before", before) + _side("after", after)
    return (
        f'<div class="sample">{f"<div class=images>{shots}</div>" if shots else ""}'
        f'<div class="turns"><p class="prompt">{_text(shown.prompt)}</p>{solution}'
        f'<div class="sides{" one" if trained else ""}">{sides}</div></div></div>'
    )


def _side(name: str, sample: Sample | None) -> str:
    if sample is None:
        return f'<div class="side"><span>{name}</span><div class="empty">no response</div></div>'
    outcome = ""
    if sample.solution is not None:
        outcome = '<em class="up">correct</em>' if sample.success else '<em class="down">wrong</em>'
    parts = ", ".join(f"{escape(part)} {value:.3g}" for part, value in sample.reward_parts.items())
    reward = "the reward failed" if sample.reward is None else f"reward {sample.reward:.3g}"
    cut_off = ", cut off" if sample.truncated else ""
    note = f"{reward}{f' ({parts})' if parts else ''} &middot; {counted(sample.length, 'token')}{cut_off}"
    return (
        f'<div class="side"><span>{name} {outcome}</span><pre class="response">{_text(sample.response)}</pre>'
        f'<p class="note">{note}</p></div>'
    )


def _text(text: str) -> str:
    return escape(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…")
