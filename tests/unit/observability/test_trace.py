"""The timeline, read as Perfetto reads it: events one by one, up to the bracket or an event that is not whole."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlarl.observability.trace import ROLES, NoTrace, Trace, Track


def read_events(text: str) -> list[dict[str, Any]]:
    """Perfetto's rules for an array of events: commas are blanks, the end of the file may come at any time."""
    assert text.startswith("["), "neither an array nor an object"
    events, depth, begin, in_string, escaped = [], 0, 0, False, False
    for place, letter in enumerate(text[1:], start=1):
        if in_string:
            in_string = letter != '"' or escaped
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter == "{":
            begin = begin if depth else place
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                events.append(json.loads(text[begin : place + 1]))
        elif letter == "]" and depth == 0:
            assert place == len(text) - 1, "data behind the end of the array"
    return events


def read_trace(path: Path) -> list[dict[str, Any]]:
    return read_events(path.read_text(encoding="utf-8"))


def names_of_threads(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def slices(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, str]]]:
    """(depth, name) of every span by track, in order. One that overlaps another without lying in it is an error."""
    names = names_of_threads(events)
    stacks: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, list[tuple[int, str]]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        track = names[event["tid"]]
        stack = stacks.setdefault(track, [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1]["ts"] + stack[-1]["dur"], f"{event} is cut in two"
        found.setdefault(track, []).append((len(stack), event["name"]))
        stack.append(event)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_spans_have_their_track_and_their_time(path):
    with Trace(path) as trace:
        trace.span("engine 1", "generate", 1_700_000_000.25, 1_700_000_001.0, rows=64, note='a "quoted" …')
        trace.span("loop", "rollout", 1_700_000_000.0, 1_700_000_002.5)
    events = json.loads(path.read_text(encoding="utf-8"))
    assert events == read_trace(path), "a file that was closed is JSON"
    generate, rollout = (e for e in events if e["ph"] == "X")
    assert (generate["ts"], generate["dur"]) == (1_700_000_000_250_000, 750_000)
    assert generate["args"] == {"rows": 64, "note": 'a "quoted" …'}
    assert (rollout["ts"], rollout["dur"]) == (1_700_000_000_000_000, 2_500_000) and "args" not in rollout
    assert slices(events) == {"engine 1": [(0, "generate")], "loop": [(0, "rollout")]}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert (processes[generate["pid"]], processes[rollout["pid"]]) == ("engine", "loop")
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert order[rollout["pid"]] < order[generate["pid"]]


def test_tracks_have_unique_ids_that_follow_from_the_name():
    names = [
        *ROLES,
        "curriculum",
        "an odd role",
        *(f"{role} {n}" for role in (*ROLES, "curriculum") for n in range(70)),
    ]
    tracks = [Track.of(name) for name in names]
    assert len({track.tid for track in tracks}) == len(names), "Perfetto names threads by tid alone"
    assert len({track.pid for track in tracks}) == len(ROLES) + 2
    assert [Track.of(role).pid for role in ROLES] == sorted(Track.of(role).pid for role in ROLES)
    assert Track.of("engine 3") == Track("engine 3", "engine", 300_000, 300_004)
    assert Track.of("curriculum").pid > Track.of("learner").pid
    assert max(track.tid for track in tracks) < 2**32


def test_blocks_within_one_tick_of_the_clock_nest(path, monkeypatch):
    stopped = SimpleNamespace(time=lambda: 1_700_000_000.0, monotonic=lambda: 5.0)
    monkeypatch.setattr("vlarl.observability.trace.time", stopped)
    trace = Trace(path)
    with trace.measure("loop", "outer"):
        for name in ("first", "second"):
            with trace.measure("loop", name), trace.measure("loop", "inner"):
                pass
    trace.close()
    found = slices(read_trace(path))
    assert found == {"loop": [(0, "outer"), (1, "first"), (2, "inner"), (1, "second"), (2, "inner")]}


def test_measured_blocks_nest_and_take_their_time(path):
    trace, begin, wall = Trace(path), time.monotonic(), time.time()
    with trace.measure("loop", "outer"), trace.measure("loop", "middle"):
        with trace.measure("loop", "first", iteration=3):
            time.sleep(0.01)
        with pytest.raises(ZeroDivisionError), trace.measure("loop", "fails"):
            raise ZeroDivisionError
    trace.close()
    events = read_trace(path)
    assert slices(events) == {"loop": [(0, "outer"), (1, "middle"), (2, "first"), (2, "fails")]}
    (first,) = (e for e in events if e["name"] == "first")
    assert 10_000 <= first["dur"] <= 1e6 * (time.monotonic() - begin) and first["args"] == {"iteration": 3}
    assert abs(first["ts"] / 1e6 - wall) <= time.monotonic() - begin + 1


def test_any_end_of_the_file_opens(path):
    """A kill may come in the middle of a line: what was whole before it is still read."""
    trace = Trace(path)
    for number in range(3):
        trace.span("learner 0", "update {[,", number, number + 0.5, note="}] \\")
    text = path.read_text(encoding="utf-8")  # not closed: each event is on disk as soon as it is recorded
    ends = [place for place in range(1, len(text)) if text[place:].startswith(",\n{")] + [len(text)]
    assert len(ends) == 4 + 3
    for length in range(1, len(text) + 1):
        assert len(read_events(text[:length])) == sum(end <= length for end in ends)
    trace.close()


@pytest.mark.parametrize("lost", [0, 1, 2, 7, 100, "all but the bracket", "all"])
def test_a_resumed_run_appends_to_the_complete_events(path, lost):
    with Trace(path) as trace:
        for number in range(5):
            trace.span("engine 0", f"before {number}", number, number + 0.5, details={"nested": "}"})
    text = path.read_text()
    path.write_text(
        text[: {"all but the bracket": 1, "all": 0}.get(lost) if isinstance(lost, str) else len(text) - lost]
    )
    survived = [e["name"] for e in read_events(path.read_text() or "[") if e["ph"] == "X"]
    assert len(survived) == {0: 5, 1: 5, 2: 5, 7: 4, 100: 4}.get(lost, 0)
    with Trace(path) as trace:
        trace.span("engine 0", "after", 100, 101)
        trace.span("engine 2", "after", 100, 101)
    events = json.loads(path.read_text())
    assert events == read_trace(path)
    assert [e["name"] for e in events if e["ph"] == "X"] == [*survived, "after", "after"]
    assert set(names_of_threads(events).values()) == {"engine 0", "engine 2"}


def test_threads_write_whole_events(path):
    trace = Trace(path)
    together = threading.Barrier(8)

    def work(number: int) -> None:
        together.wait()
        for step in range(200):
            with trace.measure(f"environments {number}", f"step {step}", worker=number):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    found = slices(json.loads(path.read_text()))
    expected = [(0, f"step {step}") for step in range(200)]
    assert found == {f"environments {n}": expected for n in range(8)}


def test_it_stops_at_its_bound_and_says_so_once_also_when_resumed(path):
    for _ in range(3):
        with Trace(path, max_spans=4) as trace:
            for number in range(3):
                trace.span("loop", f"span {number}", number, number + 1)
    events = json.loads(path.read_text())
    assert [e["name"] for e in events if e["ph"] == "X"] == ["span 0", "span 1", "span 2", "span 0"]
    (notice,) = (e for e in events if e["ph"] == "i")
    assert (notice["name"], notice["ts"], notice["s"]) == ("full: no more than 4 spans", 2_000_000, "g")
    assert events[-1] == notice
    with Trace(path.with_name("exactly.json"), max_spans=1) as trace:
        trace.span("loop", "only", 0, 1)
    assert '"i"' not in path.with_name("exactly.json").read_text(), "nothing was left out"


def test_odd_values_never_break_the_file(path):
    with Trace(path) as trace:
        trace.span(
            "loop", "backwards", 10.0, 9.0, loss=float("nan"), shape=(2, 3), name_of=Path("a"), off=None, on=True
        )
    (event,) = (e for e in json.loads(path.read_text(), parse_constant=pytest.fail) if e["ph"] == "X")
    assert event["dur"] == 0  # clocks of two machines
    assert event["args"] == {"loss": "nan", "shape": "(2, 3)", "name_of": "a", "off": None, "on": True}


def test_spans_after_the_end_are_dropped(path):
    trace = Trace(path)
    trace.close()
    text = path.read_text()
    trace.span("loop", "late", 0, 1)
    trace.close()
    assert path.read_text() == text and json.loads(text) == []


def test_a_full_disk_ends_the_timeline_and_not_the_run(path, caplog):
    trace = Trace(path)
    assert trace._file is not None
    trace._file.close()
    trace._file = open("/dev/full", "w")  # noqa: SIM115 - the trace closes it
    with trace.measure("loop", "lost"):
        pass
    trace.span("loop", "lost", 0, 1)
    trace.close()
    (record,) = caplog.records
    assert "trace.json ends here" in record.message and "No space left" in record.message


def test_no_trace_keeps_nothing(tmp_path):
    with NoTrace() as trace:
        trace.span("loop", "rollout", 0, 1, rows=3)
        with trace.measure("loop", "update"):
            pass
    assert list(tmp_path.iterdir()) == []
