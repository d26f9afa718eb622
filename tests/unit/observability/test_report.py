import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vlarl.config.training_data import TrainedOn, TrainingData, write_training_data
from vlarl.errors import UsageError
from vlarl.observability.report import curve_svg, write_comparison, write_curve, write_report
from vlarl.observability.report.charts import Line, number, thin, ticks
from vlarl.observability.report.data import Score, load_run
from vlarl.observability.report.style import CSS
from vlarl.observability.run_dir import RunDirectory

MakeRun = Callable[..., RunDirectory]


def _text(html: str) -> str:
    body = html[html.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", body))


def test_wilson_interval_matches_published_values() -> None:
    # Newcombe (1998), table I: 81 of 263 and 0 of 20.
    assert Score(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert Score(0, 20).interval == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_the_report_of_a_finished_run_shows_the_right_values(make_run: MakeRun) -> None:
    run = make_run()
    path = write_report(run.path)
    assert path == run.path / "report.html"
    html = path.read_text()
    text = _text(html)
    assert "rose from 48.5% to 93.0%, measured on 200 episodes from initial states that training never saw" in text
    assert "Of the 103 episodes that failed before, 89 now succeed; none went the other way." in text
    assert "95% interval 41.7-55.4%" in text and "95% interval 88.6-95.8%" in text
    assert "97 of 200" in text and "186 of 200" in text
    assert "5 min 0 s" in text and "builtin:tiny-oft" in text and "cores" in text
    assert f"vlarl eval {run.path}/checkpoints/final" in text
    assert "put the mug left of the bowl &lt;next to&gt; the plate" in html, "instructions are escaped"
    assert html.count("<video controls muted loop") == 4 and html.count("data:video/mp4;base64,") == 4
    assert "interrupted" not in text
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", html)
    assert titles == [
        "Success", "Return", "Episode length", "Entropy", "Approximate KL", "Clipped", "Gradient norm", "Speed"
    ]  # fmt: skip


def test_the_report_is_self_contained(make_run: MakeRun) -> None:
    html = write_report(make_run().path).read_text()
    without_data = re.sub(r"data:[a-z0-9/]+;base64,[A-Za-z0-9+/=]+", "", html)
    assert not re.search(r"https?://|<link|<script|@import|url\(", without_data)
    assert re.findall(r'src="([^"]*)"', without_data) == [""] * 4


def test_controls_of_a_video_lie_beneath_its_caption(make_run: MakeRun) -> None:
    """Its box is as high as the video, and by the controls higher."""
    html = write_report(make_run().path).read_text()
    assert re.findall(r'<div class="frame" style="--height:([\d.]+)%"><video controls', html) == ["123.8"] * 4
    assert ".frame { position: relative; padding-bottom: calc(var(--height) + 64px); }" in CSS
    assert "object-position: top" in CSS


def test_on_a_phone_the_cells_of_a_row_stack() -> None:
    narrow = CSS[CSS.index("@media (max-width: 720px)") : CSS.index("@media print")]
    assert "thead { display: none; }" in narrow and "tr { display: grid;" in narrow
    assert "td.bars { grid-column: 1 / -1;" in narrow


def test_per_task_success_before_and_after(make_run: MakeRun) -> None:
    data = load_run(make_run(videos=0).path)
    assert data.first is not None and data.last is not None
    before, after = data.first.per_task(), data.last.per_task()
    assert list(before) == list(range(10))
    assert sum(s.won for s in before.values()) == 97 and sum(s.won for s in after.values()) == 186
    assert all(s.total == 20 for s in before.values())


def test_the_curriculum_is_shown_by_task(make_run: MakeRun) -> None:
    run = make_run(videos=0)
    assert "Curriculum" not in _text(write_report(run.path).read_text()), "a run that has none"
    rows = [
        {
            "curriculum/task_01_success": 0.25,
            "curriculum/task_01_probability": 0.4,
            "curriculum/task_07_probability": 0.6,
        },
        {
            "curriculum/task_01_success": 0.5,
            "curriculum/task_01_probability": 0.75,
            "curriculum/task_07_success": 0.875,
            "curriculum/task_07_probability": 0.25,
        },
    ]
    with run.metrics_file.open("a") as file:
        file.writelines(json.dumps({"iteration": 21 + n} | row) + "\n" for n, row in enumerate(rows))
    with run.episodes_file.open("a") as file:
        file.writelines(json.dumps({"iteration": 21, "phase": "rollout", "task_id": t}) + "\n" for t in (1, 1, 1, 7))
    run.config_file.write_text("curriculum:\n  mode: uniform\n")
    assert "<h2>Curriculum</h2>" not in write_report(run.path).read_text(), "all tasks are sampled alike"
    run.config_file.write_text("curriculum:\n  mode: adaptive\n")
    html = write_report(run.path).read_text()
    order = [html.index(f"<h2>{title}</h2>") for title in ("Learning", "Tasks", "Episodes", "Curriculum", "Next steps")]
    assert order == sorted(order), "videos come before the curriculum"
    section = html[html.index("<h2>Curriculum</h2>") : html.index("<h2>Configuration</h2>")]
    assert "Sampling was adaptive" in section
    cells = re.findall(
        r'<td class="id">(\d+)</td><td>(.+?)</td>.*?class="label">([\d.]+%).*?class="label">([\d.]+%).*?"num" data-name="episodes">(\d+)<',
        section,
    )
    assert cells == [
        ("1", "put the mug left of the bowl &lt;next to&gt; the plate", "50.0%", "75.0%", "3"),
        ("7", "put the blue cube into the basket", "87.5%", "25.0%", "1"),
    ]
    assert re.findall(r"<figcaption><b>([^<]+)</b>", section) == ["Task 1", "Task 7"]
    assert "iteration 21:  success 25%,  fraction 40%" in section and "iteration 21:  fraction 60%" in section
    for svg in re.findall(r"<svg.*?</svg>", section):
        ElementTree.fromstring(svg)


def test_an_interrupted_run_is_reported_as_what_it_is(make_run: MakeRun) -> None:
    run = make_run("interrupted", last=7, videos=0)
    with run.metrics_file.open("a") as file:
        file.write('{"iteration": 8, "rollout/suc')  # what SIGKILL leaves
    text = _text(write_report(run.path).read_text())
    assert "This run was interrupted at iteration 7 of 20." in text and "stopped by Ctrl-C" in text
    assert "(evaluated after iteration 5)" in text
    assert "No video was recorded" in text
    assert f"vlarl train --resume {run.path}" in text


def test_a_run_that_never_left_its_first_evaluation(make_run: MakeRun) -> None:
    text = _text(write_report(make_run("failed", last=0, videos=1).path).read_text())
    assert "Greedy success before training is 48.5% on 200 episodes" in text
    assert "There is no evaluation after training yet." in text
    assert "no video" in text


def test_a_run_with_nothing_but_a_configuration(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "empty")
    run.config_file.write_text("not: [valid")
    text = _text(write_report(run.path).read_text())
    assert "No evaluation has ended yet" in text and "No iteration has ended yet" in text
    assert "left no status" in text and "not: [valid" in text


def reported(run: RunDirectory, before: list[bool], after: list[bool]) -> str:
    """The report's HTML for a run whose evaluations before and after had these outcomes, 20 states a task."""
    rows = [
        {"iteration": i, "phase": "eval", "task_id": n % 10, "init_state": 30 + n // 10, "success": won, "status": "ok"}
        for i, outcomes in ((0, before), (20, after))
        for n, won in enumerate(outcomes)
    ]
    run.episodes_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(run.path).read_text()


def verdict_of(html: str) -> str:
    found = re.search(r'<p class="verdict">(.*?)</p>', html, re.DOTALL)
    assert found is not None
    return found[1]


def test_success_that_fell_is_said_to_have_fallen(make_run: MakeRun) -> None:
    html = reported(make_run(videos=0), [n < 180 for n in range(200)], [70 <= n < 130 for n in range(200)])
    text = re.sub(r"<[^>]+>", "", verdict_of(html))
    assert text == (
        "Greedy success fell from 90.0% to 30.0%, measured on 200 episodes from initial states that training never saw."
        " Of the 180 episodes that succeeded before, 120 now fail; none went the other way."
    )
    assert '<span class="down">fell</span>' in verdict_of(html) and 'class="up"' not in html
    changes = re.findall(r'<td class="num"><span class="(\w+)">([^<]+)</span>', html)
    assert changes == [("down", "-60 points")] * 10
    first, second = re.findall(r'<div class="value">([^<]+)</div>', html)
    assert (first, second) == ("90.0%", "30.0%"), "before, then after"


def test_a_fall_within_the_noise_is_a_fall_and_called_noise(make_run: MakeRun) -> None:
    html = reported(make_run(videos=0), [n < 100 for n in range(200)], [n < 98 for n in range(200)])
    text = re.sub(r"<[^>]+>", "", verdict_of(html))
    assert text.startswith("Greedy success fell from 50.0% to 49.0%, measured on 200 episodes")
    assert "The 95% intervals overlap: this may be noise." in text
    assert text.endswith("Of the 100 episodes that succeeded before, 2 now fail; none went the other way.")
    changes = re.findall(r'<td class="num"><span class="(\w+)">([^<]+)</span>', html)
    assert sorted(changes) == [("down", "-5 points")] * 2 + [("same", "0")] * 8


def test_a_rise_within_the_noise_is_called_that(make_run: MakeRun) -> None:
    html = reported(make_run(videos=0), [n < 98 for n in range(200)], [n < 100 for n in range(200)])
    text = re.sub(r"<[^>]+>", "", verdict_of(html))
    assert text.startswith("Greedy success rose from 49.0% to 50.0%") and "this may be noise" in text
    assert text.endswith("Of the 102 episodes that failed before, 2 now succeed; none went the other way.")


def test_equal_success_neither_rose_nor_fell(make_run: MakeRun) -> None:
    html = reported(make_run(videos=0), [n < 100 for n in range(200)], [n >= 100 for n in range(200)])
    text = re.sub(r"<[^>]+>", "", verdict_of(html))
    assert text == (
        "Greedy success stayed at 50.0%, measured on 200 episodes from initial states that training never saw."
        " Of the 100 episodes that failed before, 100 now succeed; 100 went the other way."
    )
    assert 'class="up"' not in verdict_of(html) and 'class="down"' not in verdict_of(html)


def test_a_run_without_evaluations_claims_no_success(make_run: MakeRun) -> None:
    run = make_run(videos=0)
    run.episodes_file.write_text("")
    html = write_report(run.path).read_text()
    assert verdict_of(html) == "No evaluation has ended yet, so there is no success rate to report."
    assert '<div class="hero">' not in html and "<h2>Tasks</h2>" not in html
    after = reported(run, [], [True, False])
    assert re.sub(r"<[^>]+>", "", verdict_of(after)) == (
        "Greedy success after iteration 20 is 50.0% on 2 episodes from initial states that training never saw. "
        "It was not evaluated before."
    )


def test_a_supervised_run_reports_its_losses_and_its_best_validation(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "base")
    run.write_config("policy: {path: 'init:tiny-oft'}\ndemos: {holdout: 0.1}\n")
    rows = [
        {"iteration": 10, "train/loss": 4.5},
        {"iteration": 15, "val/l1": 0.5, "val/token_accuracy": 0.25},
        {"iteration": 20, "train/loss": 2.25, "val/l1": 0.125, "val/token_accuracy": 0.75},
        {"iteration": 25, "val/l1": 0.25, "val/token_accuracy": 0.5},
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_status("finished", 25, 25)
    html = write_report(run.path).read_text()
    text = _text(html)
    assert re.sub("</?b>", "", verdict_of(html)) == (
        "The training loss is 2.250 after step 20, from 4.500 at step 10. On held-out episodes the L1 error was lowest "
        "after step 20: 0.1250, with 75.0% of the action tokens right."
    )
    assert "Steps25 of 25" in text and "success" not in text.lower().split("next steps")[0]
    assert "vlarl finetune --resume" in text and "--optim.steps N" in text
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", html)
    assert titles == ["Loss", "Error on held-out episodes", "Token accuracy"]


def test_a_run_of_a_reward_model_reports_its_agreement(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "judge")
    run.write_config("reward: {labels: episodes}\ndemos: {holdout: 0.1}\n")
    rows = [
        {"iteration": 10, "train/loss": 0.75, "val/loss": 0.5, "val/accuracy": 0.5, "val/auc": 0.5},
        {"iteration": 20, "train/loss": 0.25, "val/loss": 0.5, "val/accuracy": 0.75, "val/auc": 0.875},
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_status("finished", 20, 20)
    html = write_report(run.path).read_text()
    assert re.sub("</?b>", "", verdict_of(html)) == (
        "The training loss is 0.250 after step 20, from 0.750 at step 10. After step 20 it agrees with 75.0% of the "
        "held-out labels, with an AUC of 0.875."
    )
    assert re.findall(r"<figcaption><b>([^<]+)</b>", html) == ["Loss", "Held-out accuracy", "Held-out AUC"]
    assert "vlarl train --reward.source model --reward.model" in _text(html) and "vlarl eval" not in _text(html)


def test_training_on_evaluation_states_is_admitted(make_run: MakeRun) -> None:
    run = make_run(videos=0)
    run.config_file.write_text("env:\n  protocol: benchmark\neval:\n  temperature: 0.5\n")
    text = _text(write_report(run.path).read_text())
    assert "never saw" not in text and "were also trained on" in text
    assert "Sampled success rose from" in text and "Evaluation is sampled and shown" in text
    assert "reedy" not in text


@pytest.mark.parametrize(
    ("states", "claim", "in_image"),
    [
        (range(30, 50), "200 episodes whose initial states were also trained on.", "trained"),
        (
            range(40),
            "200 episodes, 100 of which begin from initial states that were also trained on.",
            "partly trained",
        ),
        (range(30), "200 episodes from initial states that training never saw.", "unseen"),
    ],
)
def test_states_that_the_base_was_trained_on_are_admitted(
    make_run: MakeRun, tmp_path: Path, states: range, claim: str, in_image: str
) -> None:
    run = make_run(videos=0)
    base = TrainedOn(by="train", suite="tabletop_spatial", protocol="disjoint", task_ids=None, states=tuple(states))
    other = TrainedOn(by="train", suite="tabletop_goal", protocol="benchmark", states=tuple(range(30, 50)))
    write_training_data(run.checkpoints / "final", TrainingData((base, other)))
    html = write_report(run.path).read_text()
    assert claim in verdict_of(html)
    assert ("begin from initial states that this run" in _text(html)) == (in_image != "unseen")
    image = write_curve(run.path, tmp_path / "curve.svg").read_text()
    assert f"Greedy success on {in_image} initial states: 48.5% to 93.0%" in image


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (TrainingData(unknown=("some/<base>",)), "comes from some/&lt;base&gt;, and it is not known which"),
        (
            TrainingData((TrainedOn(by="finetune", suite="tabletop_spatial"),)),
            "demonstrations of tabletop_spatial whose initial states are not known",
        ),
        ("{}", "it has no valid training_data.json"),
        (None, "it has no valid training_data.json"),
    ],
)
def test_what_is_not_known_is_not_called_unseen(
    make_run: MakeRun, tmp_path: Path, content: TrainingData | str | None, reason: str
) -> None:
    run = make_run(videos=0)
    file = run.checkpoints / "final" / "training_data.json"
    if isinstance(content, TrainingData):
        write_training_data(run.checkpoints / "final", content)
    else:
        file.unlink() if content is None else file.write_text(content)
    html = write_report(run.path).read_text()
    assert "never saw" not in html and reason in _text(html)
    assert "measured on 200 episodes from initial states of which it is not known whether they were trained on." in (
        re.sub(r"<[^>]+>", "", verdict_of(html))
    )
    image = write_curve(run.path, tmp_path / "curve.svg").read_text()
    assert "Greedy success on possibly trained initial states: 48.5% to 93.0%" in image


def test_a_checkpoint_that_is_deleted_while_the_report_reads_is_skipped(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, listed = make_run(videos=0), Path.glob
    deleted = run.checkpoints / "step_000001" / "training_data.json"  # between the listing and the reading

    def glob(folder: Path, pattern: str) -> list[Path]:
        return [*listed(folder, pattern), *([deleted] if folder == run.checkpoints else [])]

    monkeypatch.setattr(Path, "glob", glob)
    assert load_run(run.path).training == TrainingData()


def test_episodes_that_crashed_are_not_counted_in_a_score(make_run: MakeRun) -> None:
    run = make_run(videos=0)
    row = json.loads(run.episodes_file.read_text().splitlines()[0])
    with run.episodes_file.open("a") as file:
        for task in range(10):
            crashed = row | {"task_id": task, "init_state": 99, "success": False, "status": "crashed"}
            file.write(json.dumps(crashed) + "\n")
    first = load_run(run.path).first
    assert first is not None and (first.score.won, first.score.total) == (97, 200)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        write_report(tmp_path)


def test_the_image_is_valid_and_self_contained(make_run: MakeRun, tmp_path: Path) -> None:
    path = write_curve(make_run().path, tmp_path / "curve.svg")
    root = ElementTree.fromstring(path.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    images = root.findall(f".//{svg}image")
    assert len(images) == 12 and all(i.attrib["href"].startswith("data:image/png;base64,") for i in images)
    texts = [t.text or "" for t in root.iter(f"{svg}text")]
    assert "Greedy success on unseen initial states: 48.5% to 93.0%" in texts


def test_a_comparison_names_its_lines_and_is_self_contained(tmp_path: Path) -> None:
    lines = [
        Line("uniform", [(0, 0.0), (128, 0.5)], "train", intervals=[(128, 0.4, 0.6)]),
        Line("a < b", [(0, 0.0), (128, 1.0)]),
    ]
    path = write_comparison(tmp_path / "both.svg", "Success & more", "2 seeds", lines)
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(path.read_text())
    assert [t.text for t in root.iter(f"{svg}text")][:4] == ["Success & more", "2 seeds", "uniform", "a < b"]
    plotted = {p.attrib["class"]: p.attrib["points"].split() for p in root.iter(f"{svg}polyline")}
    assert list(plotted) == ["line train", "line main"]
    ends = {kind: float(points[-1].split(",")[1]) for kind, points in plotted.items()}
    assert ends == {"line main": 12.0, "line train": 123.0}, "the plot spans y 234..12"


def test_a_curve_puts_points_where_they_belong() -> None:
    svg = curve_svg([Line("success", [(0, 0.0), (5, 0.5), (10, 1.0)])], 360, 180, (0.0, 1.0), as_percent=True)
    points = re.search(r'polyline class="line main" points="([^"]*)"', svg)
    assert points is not None
    # The plot spans x 46..346 and y 154..12.
    assert points[1] == "46.0,154.0 196.0,83.0 346.0,12.0"
    assert "iteration 5:  50%" in svg
    ElementTree.fromstring(svg)
    assert "no data" in curve_svg([Line("nothing", [])])


def test_ticks_are_round_and_enclose_the_range() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.0021, 0.0069, 3) == [0.002, 0.004, 0.006, 0.008]
    assert ticks(3.0, 3.0, 3)[0] < 3.0 < ticks(3.0, 3.0, 3)[-1]
    assert ticks(0.0, 0.0, 3)[-1] > 0.0
    assert [number(v) for v in (0, 0.5, 0.00012, 1234.5, 25000)] == ["0", "0.5", "0.00012", "1234", "2.5e4"]


def test_long_curves_are_thinned_but_keep_their_end() -> None:
    points = [(float(i), float(i)) for i in range(10_001)]
    kept = thin(points)
    assert len(kept) <= 241 and kept[0] == points[0] and kept[-1] == points[-1]
