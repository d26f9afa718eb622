"""The sections of the report below its headline; one without data is empty or says so."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from html import escape

from vlarl.config.resume_command import resume_command
from vlarl.config.words import plural
from vlarl.observability.report.charts import Line, curve_svg
from vlarl.observability.report.data import RunData, Score, Video
from vlarl.observability.report.samples import samples_body

MAX_VIDEO_BYTES = 30 * 2**20  # a report should open quickly and fit into a mail

_SMALL_CHARTS = (
    ("Loss", "train/loss", "supervised: cross-entropy of the demonstrated tokens"),
    ("Error on held-out episodes", "val/l1", "mean absolute difference of normalised actions"),
    ("Token accuracy", "val/token_accuracy", "fraction of the action tokens of held-out episodes that are right"),
    ("Held-out accuracy", "val/accuracy", "fraction of the held-out labels that a reward model's scores agree with"),
    ("Held-out AUC", "val/auc", "how often a reward model scores a good state above a bad one"),
    ("{reward}", "rollout/mean_return", "mean of the training {episodes}"),
    ("Reward in evaluation", "val/mean_reward", "mean of the evaluated responses"),
    ("Episode length", "rollout/mean_length", "environment steps"),
    ("Response length", "rollout/response_length", "tokens, mean of the training responses"),
    ("Cut off", "rollout/truncated_fraction", "fraction of responses without an end"),
    ("Different responses", "rollout/unique_responses", "fraction of a group's texts that differ"),
    ("Entropy", "train/entropy", "nats per token; at 0 there is no exploration"),
    ("Approximate KL", "train/approx_kl", "how far an update moved the policy"),
    ("Clipped", "train/clipfrac", "fraction of tokens whose ratio was clipped"),
    ("Gradient norm", "train/grad_norm", "before clipping"),
    ("Value loss", "train/value_loss", "the critic's error"),
    ("Explained variance", "train/explained_variance", "of returns, by the critic; 1 is perfect"),
    ("Speed", "rollout/env_steps_per_s", "environment steps per second"),
    ("Speed", "perf/response_tokens_per_s", "tokens of responses per second"),
)
_OF_ROBOTS = ("rollout/mean_length", "rollout/env_steps_per_s")  # one step for each prompt says nothing
_OF_PROMPTS = ("val/mean_reward",)  # of robots it is the success rate, unless the reward is the user's own


def learning(data: RunData) -> str:
    """The success curve, large, and the other curves beneath it."""
    words, judged = data.words, data.is_judged
    curve = success_curve if judged else reward_curve
    said = {"reward": words.reward.capitalize(), "episodes": plural(2, words.episode)}
    # Text in an image shrinks with it, so phones get an image of their own.
    main = f'<div class="on-wide">{curve(data)}</div><div class="on-narrow">{curve(data, 360, 240)}</div>'
    small = "".join(
        f'<figure class="panel"><figcaption><b>{title.format_map(said)}</b><span>{note.format_map(said)}</span>'
        f"</figcaption>{curve_svg([Line(title.format_map(said), points, 'plain')], 340, 170)}</figure>"
        for title, name, note in _SMALL_CHARTS
        if name not in (_OF_ROBOTS if data.is_of_prompts else _OF_PROMPTS) and (points := data.series(name))
    )
    if not data.metrics:
        return _section("Learning", "No iteration has ended yet: there are no curves.", "")
    if data.is_supervised:
        return _section("Learning", "Over optimizer steps.", f'<div class="small">{small}</div>')
    lower = ", so they may score lower" if data.decoding == "greedy" else ""
    title = (words.success if judged else words.reward).capitalize()
    lead = (
        f"{title} over iterations. Evaluation is {data.decoding}"
        f"{' and shown with its 95% interval' if judged else ''}; "
        f"training {plural(2, words.episode)} are sampled{lower}."
    )
    reached = "responses that give the solution" if data.is_of_prompts else "episodes that reach the goal"
    note = f"fraction of {reached}" if judged else f"mean over {plural(2, words.episode)}; there are no solutions"
    return _section(
        "Learning",
        lead,
        f'<figure class="panel wide"><figcaption><b>{title}</b><span>{note}</span>'
        '<span class="legend"><span><i class="main"></i>evaluation</span><span><i class="train"></i>training</span>'
        f'</span></figcaption>{main}</figure><div class="small">{small}</div>',
    )


def success_curve(data: RunData, width: int = 960, height: int = 320) -> str:
    """Success in evaluation, with intervals, and in training."""
    evaluated = {e.iteration: e.score for e in data.evaluations}
    points = dict(data.series("val/success_rate")) | {float(i): score.rate for i, score in evaluated.items()}
    intervals = [(float(i), *score.interval) for i, score in evaluated.items()]
    lines = [
        Line("training", data.series("rollout/success_rate"), kind="train"),
        Line("evaluation", sorted(points.items()), kind="main", has_dots=True, intervals=intervals),
    ]
    return curve_svg(lines, width, height, y_range=(0.0, 1.0), as_percent=True)


def reward_curve(data: RunData, width: int = 960, height: int = 320) -> str:
    """Mean reward in evaluation and in training, for prompts without solutions."""
    lines = [
        Line("training", data.series("rollout/mean_return"), kind="train"),
        Line("evaluation", data.series("val/mean_reward"), kind="main", has_dots=True),
    ]
    return curve_svg(lines, width, height)


def tasks(data: RunData) -> str:
    """Success of each task before and after, suite by suite."""
    evaluated = data.first or data.last
    if evaluated is None or not evaluated.episodes:
        return ""
    if data.is_of_prompts and len({task for each in (data.first, data.last) if each for task in each.per_task()}) == 1:
        return ""  # the user's data are one task, whose figures are those at the top
    suites = data.by_suite()
    rows = "".join(
        (_suite_row(suite, own) if len(suites) > 1 else "") + _task_rows(own) for suite, own in suites.items()
    )
    lead = (
        "Grey: before training; coloured: after." if data.last else "Before training; there is no later evaluation yet."
    )
    name = data.words.instruction.capitalize()
    return _section(
        "Tasks",
        lead,
        '<div class="scroll"><table><thead><tr><th></th>'
        f'<th>{name}</th><th>{data.words.success.capitalize()}</th><th class="num">Change</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    )


def _suite_row(suite: str, data: RunData) -> str:
    """The success of a whole suite, above its tasks."""
    before, after = (each.score if each else None for each in (data.first, data.last))
    return (
        f'<tr><td class="id"></td><td><b>{escape(suite)}</b></td>'
        f'<td class="bars">{_bar("before", before)}{_bar("after", after)}</td>'
        f'<td class="num">{_change(before, after)}</td></tr>'
    )


def _task_rows(data: RunData) -> str:
    """The success of each task of a suite."""
    before = data.first.per_task() if data.first else {}
    after = data.last.per_task() if data.last else {}
    instructions = data.instructions
    return "".join(
        f'<tr><td class="id">{task}</td><td>{escape(instructions.get(task, f"task {task}"))}</td>'
        f'<td class="bars">{_bar("before", before.get(task))}{_bar("after", after.get(task))}</td>'
        f'<td class="num">{_change(before.get(task), after.get(task))}</td></tr>'
        for task in sorted(before.keys() | after.keys())
    )


def curriculum(data: RunData) -> str:
    """How well each task went in training and how often it was sampled; empty for uniform sampling."""
    suites = data.by_suite()
    return "".join(_curriculum(own, f": {suite}" if len(suites) > 1 else "") for suite, own in suites.items())


def _curriculum(data: RunData, of: str) -> str:
    """The curriculum of a suite, which the title names with `of`."""
    known = data.curriculum_tasks
    mode = str(data.option("curriculum", "mode") or "uniform")
    if not known or mode == "uniform":
        return ""
    instructions = data.instructions
    names = {task: escape(instructions.get(task, f"task {task}")) for task in known}
    rows = "".join(
        f'<tr><td class="id">{task}</td><td>{names[task]}</td><td class="bars">{_final_values(data, task)}</td>'
        f'<td class="num" data-name="episodes">{data.num_trained(task)}</td></tr>'
        for task in known
    )
    charts = "".join(
        f'<figure class="panel"><figcaption><b>Task {task}</b><span>{names[task]}</span></figcaption>'
        f"{_curriculum_curve(data, task)}</figure>"
        for task in known
    )
    lead = (
        f"Sampling was {escape(mode)} (<code>curriculum.mode</code>). The moving success is that of training episodes; "
        "the fraction is the task's part of the next iteration's groups."
    )
    legend = (
        '<p class="legend above"><span><i class="main"></i>moving success</span>'
        '<span><i class="train"></i>fraction of the groups</span></p>'
    )
    return _section(
        f"Curriculum{escape(of)}",
        lead,
        f'{legend}<div class="scroll"><table><thead><tr><th></th><th>{data.words.instruction.capitalize()}</th>'
        "<th>At the end</th>"
        f'<th class="num">Episodes</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f'<div class="small">{charts}</div>',
    )


def _final_values(data: RunData, task: int) -> str:
    shown = (("after", "moving success", "success"), ("train", "fraction of the groups", "probability"))
    bars = []
    for kind, title, name in shown:
        if points := data.series(f"curriculum/task_{task:02d}_{name}"):
            value = points[-1][1]
            bars.append(_track(kind, value, f"{value:.1%}", title))
    return "".join(bars)


def _curriculum_curve(data: RunData, task: int) -> str:
    success, probability = (data.series(f"curriculum/task_{task:02d}_{name}") for name in ("success", "probability"))
    lines = [Line("success", success), Line("fraction", probability, "train")]
    return curve_svg(lines, 340, 150, y_range=(0.0, 1.0), as_percent=True)


def examples(data: RunData) -> str:
    """Episodes to look at: responses to prompts, or videos."""
    return _section("Samples", *samples_body(data)) if data.is_of_prompts else _videos(data)


def _videos(data: RunData) -> str:
    """Videos before and after, side by side, and of training episodes, as far as they fit into one page."""
    pairs = [(("before", before), ("after", after)) for before, after in data.video_pairs()]
    trained = [(("training", video),) for video in data.training_videos]
    if not pairs and not trained:
        return _section("Episodes", "No video was recorded (<code>eval.videos</code>).", "")
    cards, more, left = _cards(data, pairs, MAX_VIDEO_BYTES)
    lead = f"The same initial states before and after training.{more}"
    evaluated = _section("Episodes", lead, f'<div class="pairs">{cards}</div>') if pairs else ""
    if not trained:
        return evaluated
    cards, more, _ = _cards(data, trained, left)
    lead = f"Some of the episodes of iteration {data.training_videos[0].iteration}.{more}"
    return evaluated + _section("Training episodes", lead, f'<div class="pairs">{cards}</div>')


def _cards(data: RunData, shown: Sequence[Sequence[tuple[str, Video | None]]], max_bytes: int) -> tuple[str, str, int]:
    """A card for each group of videos, a remark on those that are left out, and the bytes that are left."""
    suites, used, left_out = data.by_suite(), 0, 0
    cards: list[str] = []
    for group in shown:
        videos = [video for _, video in group if video]
        size = sum(video.path.stat().st_size for video in videos)
        if cards and used + size > max_bytes:
            left_out += 1
            continue
        used += size
        video = videos[0]
        instructions = suites.get(video.suite, data).instructions
        title = escape(instructions.get(video.task_id, f"task {video.task_id}"))
        suite = escape(f"{video.suite} " if video.suite else "")
        sides = "".join(_side(name, video) for name, video in group)
        cards.append(
            f'<div class="pair"><p>{title} <span>{suite}task {video.task_id}, state {video.init_state}</span></p>'
            f'<div class="sides">{sides}</div></div>'
        )
    more = f" {left_out} more are in <code>videos/</code>." if left_out else ""
    return "".join(cards), more, max(max_bytes - used, 0)


def configuration(data: RunData) -> str:
    """The resolved configuration, folded."""
    if not data.config_text:
        return ""
    return _section(
        "Configuration",
        "",
        "<details><summary>config.yaml, every option as it was resolved</summary>"
        f"<pre>{escape(data.config_text)}</pre></details>",
    )


def commands(data: RunData) -> str:
    """Commands to run next."""
    run = shlex.quote(str(data.run.path))
    steps = sorted(data.run.checkpoints.glob("step_*"))
    final = data.run.checkpoints / "final"
    newest = final if final.is_dir() or not steps else steps[-1]
    is_finished = data.status.get("state") == "finished"
    length = "optim.steps" if data.is_supervised else "run.iterations"
    resume = resume_command(data.run.path, {length: "N"} if is_finished else {})
    use = {"Evaluate": f"vlarl eval {shlex.quote(str(newest))}"}
    if data.is_of_reward_model:
        use = {"Reward with it": f"vlarl train --reward.source model --reward.model {shlex.quote(str(newest))}"}
    rows = {
        "Train further" if is_finished else "Resume": resume,
        **use,
        "Watch the curves": f"tensorboard --logdir {run}/tensorboard",
        "Update this report": f"vlarl report {run}",
    }
    items = "".join(f"<dt>{name}</dt><dd><code>{escape(text)}</code></dd>" for name, text in rows.items())
    return _section("Next steps", "", f'<dl class="commands">{items}</dl>')


def _section(title: str, lead: str, body: str) -> str:
    introduction = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{introduction}{body}</section>"


def _bar(kind: str, score: Score | None) -> str:
    if score is None:
        return ""
    low, high = score.interval
    text = f"{score.won} of {score.total}"
    return _track(kind, score.rate, text, f"{kind}: {score.rate:.1%}, 95% interval {low:.1%} to {high:.1%}")


def _track(kind: str, fraction: float, text: str, title: str) -> str:
    return (
        f'<div class="bar {kind}" title="{title}"><span class="track"><i style="width:{100 * fraction:.1f}%"></i>'
        f'</span><span class="label">{text}</span></div>'
    )


def _change(before: Score | None, after: Score | None) -> str:
    if before is None or after is None:
        return ""
    points = 100 * (after.rate - before.rate)
    kind = "up" if points > 0.05 else "down" if points < -0.05 else "same"
    return f'<span class="{kind}">{points:+.0f} points</span>' if kind != "same" else '<span class="same">0</span>'


def _height(video: Video) -> float:
    """Height of a video in percent of its width, from its track header; that of a square scene where there is none."""
    content = video.path.read_bytes()
    start = content.find(b"tkhd")
    if start < 0:
        return 124.0
    end = start - 4 + int.from_bytes(content[start - 4 : start], "big")  # the size of the box is before its name
    width, height = (int.from_bytes(content[end - at : end - at + 2], "big") for at in (8, 4))
    return 100 * height / width if width and height else 124.0


def _side(name: str, video: Video | None) -> str:
    if video is None:
        return f'<div class="side"><span>{name}</span><div class="empty">no video</div></div>'
    outcome = '<em class="up">success</em>' if video.success else '<em class="down">failure</em>'
    data = base64.b64encode(video.path.read_bytes()).decode("ascii")
    return (
        f'<div class="side"><span>{name} {outcome}</span><div class="frame" style="--height:{_height(video):.1f}%">'
        f'<video controls muted loop playsinline preload="metadata" src="data:video/mp4;base64,{data}"></video>'
        "</div></div>"
    )
