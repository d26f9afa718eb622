import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from fakes.eval_records import SETTINGS, episode, record

from vlarl.cli import main
from vlarl.errors import UsageError
from vlarl.evaluation.record import EvalDirectory, find_records, new_folder, read_record, results_root
from vlarl.observability.episodes import episode_row
from vlarl.types import EvalResult

NOON = datetime(2025, 1, 2, 12, 0, 0)
OUTCOMES = {(0, 30): True, (0, 31): False, (0, 32): None, (1, 30): True, (1, 31): True}


def test_results_hold_every_value_and_every_episode(tmp_path: Path) -> None:
    directory = EvalDirectory.create(tmp_path / "a" / "b")
    directory.write(record(OUTCOMES, protocol="disjoint", num_trained_states=0))
    content = json.loads(directory.results_file.read_text())
    assert (content["schema"], content["complete"], content["num_planned"]) == (1, True, 5)
    assert (content["suite"], content["protocol"], content["num_trained_states"]) == ("tabletop_spatial", "disjoint", 0)
    assert content["total"] == {
        "won": 3,
        "episodes": 4,  # one crashed: neither won nor lost
        "crashed": 1,
        "rate": 0.75,
        "low": pytest.approx(0.30064, abs=5e-6),
        "high": pytest.approx(0.95441, abs=5e-6),
        "mean_length": 10.0,
    }
    first, second = content["tasks"]
    assert (first["task_id"], first["instruction"], first["won"], first["episodes"]) == (0, "do 0", 1, 2)
    assert (second["won"], second["episodes"], second["high"]) == (2, 2, 1.0)
    assert [e["status"] for e in content["episodes"]] == ["ok", "ok", "crashed", "ok", "ok"]
    assert content["episodes"][0] == {
        "episode_id": "tabletop_spatial-t00-s030-0000000000000007",
        "suite": "tabletop_spatial",
        "task_id": 0,
        "init_state": 30,
        "seed": 7,
        "instruction": "do 0",
        "success": True,
        "length": 10,
        "return": 1.0,
        "status": "ok",
        "num_retries": 0,
    }


def test_a_task_of_which_nothing_could_be_run_has_no_rate(tmp_path: Path) -> None:
    directory = EvalDirectory.create(tmp_path / "x")
    directory.write(record({(0, 30): True, (1, 30): None}))
    _, task = json.loads(directory.results_file.read_text())["tasks"]
    assert (task["won"], task["episodes"], task["crashed"]) == (0, 0, 1)
    assert task["rate"] is task["low"] is task["high"] is task["mean_length"] is None


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    directory = EvalDirectory.create(tmp_path / "x")
    written = record(OUTCOMES, folder=tmp_path / "x", policy={"actions": "l1"})
    directory.write(written)
    assert read_record(tmp_path / "x") == written


def test_an_older_file_is_read_with_its_name_for_retries(tmp_path: Path) -> None:
    """Older versions wrote `redone`, in results.json and in episodes.jsonl."""
    retried = [replace(episode(0, 31, True), num_retries=2), episode(1, 30, False)]
    rows = [episode_row(e) for e in retried]
    for row in rows:
        row["redone"] = row.pop("num_retries")
    content = record({}, planned=2).to_json()
    directory = EvalDirectory.create(tmp_path / "x")
    for complete in (True, False):
        directory.results_file.write_text(json.dumps({**content, "complete": complete, "episodes": rows}))
        directory.episodes_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert read_record(tmp_path / "x").result == EvalResult(tuple(retried), complete)


def test_what_a_killed_process_left_is_read_from_its_rows(tmp_path: Path) -> None:
    directory = EvalDirectory.create(tmp_path / "x")
    directory.write(record({}, planned=4))  # as at the beginning
    ended = [episode(1, 30, True), episode(0, 31, False)]
    rows = [json.dumps({"iteration": 0, "phase": "eval", **episode_row(e)}) for e in ended]
    directory.episodes_file.write_text("\n".join(rows) + '\n{"episode_id": "tabl')
    found = read_record(tmp_path / "x")
    assert found.result == EvalResult((episode(0, 31, False), episode(1, 30, True)), complete=False)
    assert (found.num_planned, found.settings) == (4, SETTINGS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not an evaluation: its results.json can't be read"),
        ("{", "is not valid JSON"),
        ("[]", "was not written by this version"),
        ('{"schema": 99}', "which reads schema 1"),
        ('{"schema": 1, "complete": true}', "is damaged"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_is_not_an_evaluation_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_record(tmp_path)


def test_bad_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(UsageError, match="is not valid JSON"):
        read_record(tmp_path)


ODD = (None, -1, 10**30, float("nan"), "", "no", [], [None], {}, True)


@pytest.mark.parametrize("place", ["settings", "episode"])
def test_values_of_another_kind_are_refused_or_compared_without_a_traceback(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = record({(0, 30): True, (1, 31): False}, planned=2).to_json()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps(whole))
    (tmp_path / "b").mkdir()
    for name in whole if place == "settings" else whole["episodes"][0]:
        for value in ODD:
            spoilt = json.loads(json.dumps(whole))
            (spoilt if place == "settings" else spoilt["episodes"][0])[name] = value
            (tmp_path / "b" / "results.json").write_text(json.dumps(spoilt))
            code = main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
            assert code in (0, 2), (name, value)
            assert code == 0 or capsys.readouterr().err.startswith("error: "), (name, value)


@pytest.mark.parametrize("value", ["no", 1, None, float("nan")])
def test_a_success_that_is_neither_true_nor_false_is_not_counted(tmp_path: Path, value: object) -> None:
    content = record({(0, 30): True}, planned=1).to_json()
    content["episodes"][0]["success"] = value
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"results.json is damaged .*success is"):
        read_record(tmp_path)


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already, and results are never overwritten"):
        EvalDirectory.create(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        EvalDirectory.create(tmp_path / "file" / "folder")


def test_results_go_to_the_right_folder_and_never_twice_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    loose = new_folder("openvla/openvla-7b@main", "libero_goal", NOON)
    assert loose == Path("evals/openvla-7b-main_libero_goal_20250102_120000")
    assert new_folder("builtin:tiny-oft", "gym", NOON).name == "builtin-tiny-oft_gym_20250102_120000"
    assert results_root(str(checkpoint)) == Path("evals"), "nothing says that this is a run"
    (tmp_path / "runs" / "first" / "config.yaml").write_text("")
    folder = new_folder("runs/first/checkpoints/final", "tabletop_goal", NOON)
    assert folder == tmp_path / "runs" / "first" / "eval" / "20250102_120000"
    folder.mkdir(parents=True)
    assert new_folder(str(checkpoint), "tabletop_goal", NOON).name == "20250102_120000_2"


def test_records_are_found_newest_first_and_damaged_ones_skipped(tmp_path: Path) -> None:
    import os

    for number, name in enumerate(("old", "broken", "new")):
        directory = EvalDirectory.create(tmp_path / name)
        directory.write(record(OUTCOMES, machine=name))
        if name == "broken":
            directory.results_file.write_text("{")
        os.utime(directory.results_file, (number, number))
    assert [found.settings.machine for found in find_records(tmp_path)] == ["new", "old"]
    assert list(find_records(tmp_path / "nothing")) == []
