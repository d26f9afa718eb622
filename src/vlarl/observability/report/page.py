"""The report: one self-contained HTML file, built from whatever a run has written so far."""

from __future__ import annotations

from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

from vlarl.config.words import counted, plural
from vlarl.observability.clock import duration_in_words
from vlarl.observability.files import write_atomically
from vlarl.observability.report.data import Evaluation, RunData, Score, load_run
from vlarl.observability.report.sections import commands, configuration, curriculum, examples, learning, tasks
from vlarl.observability.report.style import CSS

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$css</style>
</head>
<body>
<main>
<header>
<div class="eyebrow">vlarl run report $badge</div>
<h1>$name</h1>
<p class="verdict">$verdict</p>
$notice
$hero
$facts
</header>
$sections
<footer>Written $written from config.yaml, status.json, metrics.jsonl, episodes.jsonl and $examples in
<code>$path</code>.</footer>
</main>
</body>
</html>
""")


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run's folder and return its path; a run that has not ended is reported as it is."""
    data = load_run(Path(run_dir))
    write_atomically(data.run.report_file, render(data))
    return data.run.report_file


def render(data: RunData) -> str:
    """The report as HTML."""
    state = str(data.status.get("state", "unknown"))
    sections = (learning(data), tasks(data), examples(data), curriculum(data), configuration(data), commands(data))
    return _PAGE.substitute(
        title=escape(f"{data.run.name} - vlarl report"),
        css=CSS,
        badge=f'<span class="badge {escape(state, quote=True)}">{escape(state)}</span>',
        name=escape(data.run.name),
        verdict=verdict(data),
        notice=_notice(data, state) + _warnings(data),
        hero=_hero(data),
        facts=_facts(data),
        sections="\n".join(section for section in sections if section),
        written=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        examples="samples.jsonl" if data.is_of_prompts else "videos/",
        path=escape(str(data.run.path)),
    )


def verdict(data: RunData) -> str:
    """One or two sentences: what training did to success, and whether the difference is more than noise."""
    first, last = data.first, data.last
    states, how = _states(data), f"{data.decoding.capitalize()} {data.words.success}"
    if first is None and last is None:
        return _reward_verdict(data)
    if first is None or last is None:
        known = first or last
        assert known is not None
        when = "before training" if known is first else f"after iteration {known.iteration}"
        missing = "There is no evaluation after training yet." if last is None else "It was not evaluated before."
        rate = f"<b>{_percent(known.score)}</b> on {known.score.total} {states}"
        return f"{how} {when} is {rate}. {missing}"
    before, after = first.score, last.score
    at = "" if last.iteration == data.iteration else f" (evaluated after iteration {last.iteration})"
    measured = f"{at}, measured on {after.total} {states}."
    if after.rate == before.rate:
        return f"{how} stayed at <b>{_percent(after)}</b>{measured}{_changed(data, first, last)}"
    verb, kind = ("rose", "up") if after.rate > before.rate else ("fell", "down")
    is_clear = after.interval[0] > before.interval[1] or after.interval[1] < before.interval[0]
    noise = "" if is_clear else " The 95% intervals overlap: this may be noise."
    sentence = (
        f'{how} <span class="{kind}">{verb}</span> from <b>{_percent(before)}</b> to <b>{_percent(after)}</b>{measured}'
    )
    return sentence + noise + _changed(data, first, last)


def _reward_verdict(data: RunData) -> str:
    """The same where success is not known: no evaluation, or prompts without solutions."""
    rewards = data.series("val/mean_reward")
    if data.is_supervised:
        return _supervised_verdict(data)
    if not rewards:
        return f"No evaluation has ended yet, so there is no {data.words.rate} to report."
    (first, before), (last, after) = rewards[0], rewards[-1]
    figure = f"<b>{after:.3f}</b> after iteration {last:.0f}" if last else f"<b>{after:.3f}</b> before training"
    change = f", from <b>{before:.3f}</b> before training" if last and not first else ""
    return f"The mean reward of evaluated {plural(2, data.words.episode)} is {figure}{change}. Success is not known."


def _supervised_verdict(data: RunData) -> str:
    """What imitation did to the loss, and to the error on held-out episodes."""
    losses, errors = data.series("train/loss"), data.series("val/l1")
    if not losses:
        return "No row of metrics has been written yet, so there is no loss to report."
    (first, before), (last, after) = losses[0], losses[-1]
    loss = f"The training loss is <b>{after:.3f}</b> after step {last:.0f}"
    change = "." if first == last else f", from {before:.3f} at step {first:.0f}."
    if agreement := data.series("val/accuracy"):
        step, agreed = agreement[-1]
        area = dict(data.series("val/auc")).get(step)
        auc = "" if area is None else f", with an AUC of <b>{area:.3f}</b>"
        return f"{loss}{change} After step {step:.0f} it agrees with <b>{agreed:.1%}</b> of the held-out labels{auc}."
    if not errors:
        return f"{loss}{change} There is no validation (<code>demos.holdout</code>)."
    step, best = min(errors, key=lambda point: point[1])
    accuracy = dict(data.series("val/token_accuracy")).get(step)
    tokens = "" if accuracy is None else f", with {accuracy:.1%} of the action tokens right"
    return (
        f"{loss}{change} On held-out episodes the L1 error was lowest after step {step:.0f}: <b>{best:.4f}</b>{tokens}."
    )


def _changed(data: RunData, first: Evaluation, last: Evaluation) -> str:
    """How many episodes changed their outcome; the larger group first."""
    before, after = first.outcomes(), last.outcomes()
    both = before.keys() & after.keys()
    if not both:
        return ""
    fixed = sum(after[key] and not before[key] for key in both)
    broken = sum(before[key] and not after[key] for key in both)
    won = sum(before[key] for key in both)
    if data.is_of_prompts:
        if broken > fixed:
            changed, other = f"{counted(won, 'response')} that were correct before, {broken} are now wrong", fixed
        else:
            wrong = counted(len(both) - won, "response")
            changed, other = f"{wrong} that were wrong before, {fixed} are now correct", broken
    elif broken > fixed:
        changed, other = f"{counted(won, 'episode')} that succeeded before, {broken} now fail", fixed
    else:
        changed, other = f"{counted(len(both) - won, 'episode')} that failed before, {fixed} now succeed", broken
    return f" Of the {changed}; {other or 'none'} went the other way."


def _states(data: RunData) -> str:
    seen = data.seen
    if data.is_of_prompts:
        return {
            "unseen": "prompts that were held out of training",
            "trained": "prompts that were also trained on",
            "partly trained": f"prompts, {seen.num_seen} of which were also trained on",
            "not known": "prompts of which it is not known whether they were trained on",
        }[seen.kind]
    return {
        "unseen": "episodes from initial states that training never saw",
        "trained": "episodes whose initial states were also trained on",
        "partly trained": f"episodes, {seen.num_seen} of which begin from initial states that were also trained on",
        "not known": "episodes from initial states of which it is not known whether they were trained on",
    }[seen.kind]


def _warnings(data: RunData) -> str:
    """Warnings about the initial states that qualify the success rate."""
    if data.first is None and data.last is None:
        return ""
    return "".join(f'<p class="notice">Warning: {escape(warning)}</p>' for warning in data.seen.warnings)


def _notice(data: RunData, state: str) -> str:
    if state == "finished":
        return ""
    planned = data.status.get("iterations")
    progress = escape(f"iteration {data.iteration}" + (f" of {planned}" if planned else ""))
    texts = {
        "running": f"This run has not ended: it is at {progress}, or its process was killed there.",
        "interrupted": f"This run was interrupted at {progress}.",
        "failed": f"This run failed at {progress}.",
    }
    text = texts.get(state, f"This run left no status; its metrics end at {progress}.")
    message = str(data.status.get("message") or "")
    detail = f" Message: <code>{escape(message)}</code>" if message else ""
    return f'<p class="notice">{text} The report shows the data so far.{detail}</p>'


def _hero(data: RunData) -> str:
    shown = [("before", "before training", data.first)]
    if data.last is not None:
        shown.append(("after", f"after {counted(data.last.iteration, 'iteration')}", data.last))
    scores = [(kind, label, e.score) for kind, label, e in shown if e is not None]
    if not scores:
        return ""
    figures = "".join(
        f'<div class="figure {kind}"><div class="name">{label}</div><div class="value">{_percent(score)}</div>'
        f'<div class="range">{_interval(score)} &middot; {score.won} of {score.total}</div></div>'
        for kind, label, score in scores
    )
    return f'<div class="hero">{figures}{_scale([(kind, score) for kind, _, score in scores])}</div>'


def _scale(scores: list[tuple[str, Score]]) -> str:
    """Both rates with their intervals on one scale from 0 to 100%."""
    width, row = 320, 26
    height = row * len(scores) + 24
    parts = []
    for i, (kind, score) in enumerate(scores):
        y = i * row + 4
        low, high = score.interval
        parts.append(f'<rect class="track" x="0" y="{y + 5}" width="{width}" height="2" rx="1"/>')
        parts.append(
            f'<rect class="band {kind}" x="{low * width:.1f}" y="{y}" width="{(high - low) * width:.1f}" '
            'height="12" rx="6"/>'
        )
        parts.append(f'<circle class="pin {kind}" cx="{score.rate * width:.1f}" cy="{y + 6}" r="5"/>')
    marks = ((0, "start", "0"), (width / 2, "middle", "50%"), (width, "end", "100%"))
    parts += [f'<text x="{x}" y="{height - 4}" text-anchor="{anchor}">{text}</text>' for x, anchor, text in marks]
    label = "rates before and after with 95% intervals"
    return (
        f'<svg class="scale" viewBox="-6 0 {width + 12} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _facts(data: RunData) -> str:
    planned = data.status.get("iterations")
    facts = {
        "Steps" if data.is_supervised else "Iterations": f"{data.iteration}" + (f" of {planned}" if planned else ""),
        "Duration": "" if data.seconds is None else duration_in_words(data.seconds),
        "Tasks": ", ".join(data.suites) if data.option("env", "suite") else None,
        "Policy": data.option("policy", "path"),
        "Algorithm": str(data.option("algorithm", "name") or "").upper(),
        "Seed": data.option("run", "seed"),
        "Machine": data.status.get("machine") or data.status.get("host"),
        "Last written": _time(data.status.get("updated")),
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f'<dl class="facts">{items}</dl>'


def _time(value: object) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{datetime.fromtimestamp(value).astimezone():%Y-%m-%d %H:%M}"


def _percent(score: Score) -> str:
    return f"{100 * score.rate:.1f}%"


def _interval(score: Score) -> str:
    low, high = score.interval
    return f"95% interval {100 * low:.1f}-{100 * high:.1f}%"
