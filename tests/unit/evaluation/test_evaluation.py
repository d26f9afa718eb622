"""Evaluation: by a collector written by hand, and with a small policy on the tabletop."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.eval_records import SETTINGS, episode

import vlarl.evaluation.run
from vlarl.api import evaluate
from vlarl.config import load_config, to_yaml
from vlarl.decisions import Sampling
from vlarl.envs.base import SuiteSpec, TaskSpec
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.errors import UsageError
from vlarl.evaluation.record import read_record
from vlarl.evaluation.request import eval_request
from vlarl.evaluation.run import EvalLedger, evaluate_policy, fingerprint, recorded_tasks, run_evaluation
from vlarl.interrupt import Interrupted
from vlarl.policies.load import checkpoint_folder
from vlarl.rollout.collector import Episode
from vlarl.types import EpisodeResult, EvalResult, Task

SPEC = SuiteSpec("fake", tuple(TaskSpec(i, f"do {i}", 9) for i in range(3)), (0,), (1,), (1,))
FRAMES = (np.zeros((64, 64, 3), np.uint8),) * 2


class FakeCollector:
    """Episodes end in the reverse order of the tasks; that of task i succeeds if i is even; some crash."""

    def __init__(self, trajectory: Callable, crash: Sequence[int] = ()) -> None:
        self.pool = SimpleNamespace(spec=SPEC)
        self.trajectory, self.crash = trajectory, crash
        self.record: frozenset[int] = frozenset()

    def episodes(self, tasks, sampling, plan, check):
        self.record = frozenset(index for index, task in enumerate(tasks) if plan.video(task))
        for index in reversed(range(len(tasks))):
            i = tasks[index].task_id
            whole = replace(self.trajectory([[0.0], [1.0]], success=i % 2 == 0), task=tasks[index], num_retries=i)
            ended = replace(whole, status="crashed", transitions=()) if i in self.crash else whole
            yield index, Episode(ended, FRAMES if index in self.record else ())
            check()


TASKS = [Task("fake", i, 1, seed=i) for i in range(3)]


def test_each_episode_comes_as_it_ends_with_the_index_of_its_task(trajectory):
    ended = list(evaluate_policy(FakeCollector(trajectory, crash=[2]), TASKS, Sampling(0.0)))
    assert [index for index, _, _ in ended] == [2, 1, 0]
    assert [(e.instruction, e.outcome, e.num_retries) for _, e, _ in ended] == [
        ("do 2", "crashed", 2),  # before the policy was given an instruction
        ("open the drawer", "failure", 1),
        ("open the drawer", "success", 0),  # as the policy was given it
    ]
    assert [trajectory.task for _, _, trajectory in ended] == TASKS[::-1]
    result = EvalResult(tuple(episode for _, episode, _ in ended))
    assert (result.won, result.success_rate, result.num_crashed) == (1, 0.5, 1)
    assert (result.mean_length, result.mean_return) == (2.0, 1.0)
    assert result.per_task() == {0: (1, 1), 1: (0, 1), 2: (0, 0)}


def test_recorded_episodes_come_with_their_frames(trajectory):
    collector = FakeCollector(trajectory)
    ended = list(evaluate_policy(collector, TASKS, Sampling(0.0), num_videos=2))
    assert collector.record == {0, 1} and [(i, len(e.frames)) for i, e, _ in ended] == [(2, 0), (1, 2), (0, 2)]


def test_an_evaluation_can_be_stopped_between_episodes(trajectory):
    def check() -> None:
        raise Interrupted

    ended = evaluate_policy(FakeCollector(trajectory), TASKS, Sampling(0.0), 0, check)
    assert next(ended)[0] == 2
    with pytest.raises(Interrupted):
        next(ended)


def test_videos_are_distributed_over_the_tasks():
    assert recorded_tasks(200, 4) == {0, 50, 100, 150}
    assert recorded_tasks(3, 99) == {0, 1, 2} and recorded_tasks(3, 0) == frozenset()


def test_a_rate_of_nothing_is_not_a_number():
    assert np.isnan(EvalResult((episode(0, 1, None),)).success_rate)


@pytest.mark.parametrize(
    ("videos", "written"), [("all", "FSC"), ("failures", "FC"), (1, "FSC"), (0, "FSC")]
)  # a count: every episode that has frames was meant to be recorded
def test_the_ledger_writes_each_episode_as_it_ends(tmp_path, videos, written):
    ended = [replace(episode(0, s, success), frames=FRAMES) for s, success in enumerate((False, True, None))]
    tasks = [e.task for e in reversed(ended)]
    with EvalLedger(SETTINGS, tasks, videos, tmp_path / "x") as ledger:
        assert json.loads((tmp_path / "x" / "results.json").read_text())["complete"] is False
        for count, result in enumerate(ended, start=1):
            assert ledger.take(result).frames == ()
            assert len((tmp_path / "x" / "episodes.jsonl").read_text().splitlines()) == count
    names = {
        "F": "s000-0000000000000007_failure",
        "S": "s001-0000000000000007_success",
        "C": "s002-0000000000000007_crashed",
    }
    found = {path.name for path in (tmp_path / "x" / "videos").iterdir()}
    assert found == {f"tabletop_spatial-t00-{names[outcome]}.mp4" for outcome in written}
    assert ledger.record.result.complete
    assert [e.task for e in ledger.record.result.episodes] == tasks, "in the order of the tasks"
    assert ledger.num_videos == (videos if isinstance(videos, int) else 3)


def test_however_an_evaluation_ends_its_folder_says_what_was_measured(tmp_path):
    ended, missing = episode(0, 1, True), episode(0, 2, True)
    tasks = [ended.task, missing.task]
    with pytest.raises(ZeroDivisionError), EvalLedger(SETTINGS, tasks, 0, tmp_path / "x") as ledger:
        ledger.take(ended)
        raise ZeroDivisionError
    content = json.loads((tmp_path / "x" / "results.json").read_text())
    assert (content["complete"], content["total"]["won"], len(content["episodes"])) == (False, 1, 1)
    assert "ZeroDivisionError" in (tmp_path / "x" / "eval.log").read_text()


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with EvalLedger(SETTINGS, [episode(0, 1, True).task], "all", None) as ledger:
        ledger.take(episode(0, 1, True))
    assert ledger.record.result.complete and ledger.num_videos == 0 and list(tmp_path.iterdir()) == []


BUILTIN = "builtin:tiny-oft"  # turns the stove on (task 3), and can't put the bowl on the plate (task 0)


def test_an_evaluation_from_python_and_an_episode_of_it_again(tmp_path):
    told: list[tuple[str, str]] = []
    settings = {"suite": "tabletop_goal", "tasks": [3, 0], "episodes": 2, "device": "cpu"}
    result = evaluate(
        BUILTIN, **settings, out=tmp_path / "x", videos=1, on_episode=lambda e: told.append((e.phase, e.result.outcome))
    )
    assert [(e.task.task_id, e.task.init_state, e.outcome, e.length) for e in result.episodes] == [
        (3, 30, "success", 7),
        (3, 31, "success", 7),
        (0, 30, "failure", 32),
        (0, 31, "failure", 32),
    ]
    assert sorted(told) == [("eval", "failure")] * 2 + [("eval", "success")] * 2
    record = read_record(tmp_path / "x")
    assert sorted(record.result.episodes, key=result.episodes.index) == list(result.episodes)
    kept = record.settings
    assert (kept.suite, kept.protocol, kept.temperature, kept.task_ids) == ("tabletop_goal", "benchmark", 0.0, (0, 3))
    assert (kept.max_steps, kept.num_trained_states, kept.init_states) == (32, 0, (30, 31))
    assert (kept.training_data_from, kept.warnings) == (f"{BUILTIN}/training_data.json", ())
    assert kept.fingerprint == fingerprint(checkpoint_folder(BUILTIN))
    assert len(list((tmp_path / "x" / "videos").iterdir())) == 1
    assert (tmp_path / "x" / "eval.log").is_file()
    assert evaluate(BUILTIN, **settings, num_envs=2) == result, (
        "no matter how many run side by side, nor what is filmed"
    )

    wanted = result.episodes[1]
    request = eval_request(BUILTIN, {}, videos="all", device="cpu", episode=wanted.task.episode_id)
    replay = run_evaluation(request, tmp_path / "again")
    assert replay.result.episodes == (wanted,) and replay.settings.replay_of == wanted.task.episode_id
    assert [path.name for path in (tmp_path / "again" / "videos").iterdir()] == [
        f"{wanted.task.episode_id}_success.mp4"
    ]


class WatchedPool(TabletopPool):
    """Knows whether it was closed, and how many environments it was made with."""

    made: list["WatchedPool"] = []

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.is_closed = False
        self.made.append(self)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def pools(monkeypatch) -> list[WatchedPool]:
    monkeypatch.setattr(WatchedPool, "made", [])

    def build(env, gym, num_envs, image_size, reward, prompts):
        return WatchedPool(env.suite, num_envs, image_size, env.cameras, reward)

    monkeypatch.setattr(vlarl.evaluation.run, "build_pool", build)
    return WatchedPool.made


def test_ctrl_c_keeps_what_has_ended_and_leaves_nothing_running(checkpoint, tmp_path, pools):
    def on_result(result: EpisodeResult, done: int, total: int) -> None:
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    given = {"env.task_ids": (0, 1), "env.num_envs": 2}
    record = run_evaluation(eval_request(checkpoint, given, states_per_task=2), tmp_path / "x", on_result)
    assert not record.result.complete and (len(record.result.episodes), record.num_planned) == (2, 4)
    assert read_record(tmp_path / "x").result == record.result
    assert [pool.is_closed for pool in pools] == [True]
    assert signal.getsignal(signal.SIGINT) is before
    assert "interrupted after 2 of 4 episodes" in (tmp_path / "x" / "eval.log").read_text()


def test_a_request_that_is_refused_closes_its_pool_and_makes_no_folder(checkpoint, tmp_path, pools):
    for episode_id, message in (
        ("tabletop_spatial-t00-s077-0000000000000001", "has no initial state 77; its states are 0 to 49"),
        ("tabletop_spatial-t10-s030-0000000000000001", r"has no task \[10\]"),
    ):
        with pytest.raises(UsageError, match=message):
            run_evaluation(eval_request(checkpoint, {}, episode=episode_id), tmp_path / "x")
    assert [(pool.num_envs, pool.is_closed) for pool in pools] == [(1, True)] * 2, "one episode needs one environment"
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="exists already"):
        evaluate(checkpoint, out=tmp_path)


def test_the_folder_that_workers_of_an_evaluation_do_not_see_is_named_by_its_own_option(checkpoint, monkeypatch):
    class Cluster:
        def __init__(self, config, logs, num_threads, trace, folder):
            raise UsageError(folder.refusal("engine-0", logs.parent))

    monkeypatch.setattr("vlarl.run.cluster.Cluster", Cluster)
    with pytest.raises(UsageError, match=r"^--out: engine-0 runs on .* set --out to a folder that they all mount"):
        run_evaluation(eval_request(checkpoint, {"distributed.backend": "ray", "env.num_envs": 2}, states_per_task=1))


@pytest.mark.parametrize("before", ["nothing", "the parent", "a file beside it"])
def test_an_evaluation_on_a_cluster_that_is_refused_leaves_no_folder(checkpoint, tmp_path, monkeypatch, before):
    """Its workers have written their logs by then."""

    def launch(config, num_slots, logs):
        logs.mkdir(parents=True)
        (logs / "engine-0.log").write_text("it started")
        raise UsageError("--out: engine 0 does not see the folder")

    monkeypatch.setattr("vlarl.run.cluster.launch_evaluation", launch)
    given = {"distributed.backend": "ray", "env.num_envs": 2}
    if before != "nothing":
        (tmp_path / "both").mkdir()
    if before == "a file beside it":
        (tmp_path / "both" / "notes").touch()
    with pytest.raises(UsageError, match="engine 0 does not see"):
        run_evaluation(eval_request(checkpoint, given, states_per_task=1), tmp_path / "both" / "A")
    left = {"nothing": [], "the parent": ["both"], "a file beside it": ["both", "both/notes"]}[before]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == left


@pytest.mark.parametrize(("trained", "seen"), [("disjoint", 0), ("benchmark", 2)])
def test_states_that_the_run_trained_on_are_counted(checkpoint, tmp_path, trained, seen):
    run = tmp_path / "runs" / "first"
    shutil.copytree(checkpoint, run / "checkpoints" / "final")
    (run / "config.yaml").write_text(to_yaml(load_config(overrides={"env.protocol": trained})))
    request = eval_request(
        run / "checkpoints" / "final", {"env.task_ids": (0,), "env.protocol": "disjoint"}, states_per_task=2
    )
    settings = run_evaluation(request).settings
    assert (settings.init_states, settings.num_trained_states) == ((30, 31), seen)
    assert [warning.partition(" begin")[0] for warning in settings.warnings] == (["2 of 2 episodes"] if seen else [])


def test_a_fingerprint_tells_weights_apart_and_leaves_the_trainers_files_out(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert fingerprint(copy) == fingerprint(checkpoint)
    (copy / "trainer.safetensors").write_bytes(b"moments")
    assert fingerprint(copy) == fingerprint(checkpoint)
    (weights,) = copy.glob("model*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copy) != fingerprint(checkpoint)
