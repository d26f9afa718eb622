"""Workers that die or hang: replaced, or the run ends with what to do; in time, and with nothing left running."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from fakes.cluster_runs import SMALL, ClusterRun, assert_equal_rows, flags, rows, wait_for
from fakes.processes import MODULES

from vlarl.config.source.load import load_config
from vlarl.loop import train

ENV_LIMIT_S, LIMIT_S = 8, 20
ONE_ENV_WORKER = {"distributed.num_env_workers": 1}  # where more would show nothing else, to save time
ONE_OF_EACH = SMALL | {
    "run.iterations": 4,
    "distributed.num_reward_workers": 1,
    "distributed.timeout_s": LIMIT_S,
    "distributed.restarts": 0,
    "env.timeout_s": ENV_LIMIT_S,
}
SLACK_S = 120  # for a worker to start and for the run to end, on a busy machine


@pytest.fixture(scope="module", autouse=True)
def killed(tmp_path_factory):
    """A run whose driver is killed, started first: two of Ray's own agents keep running for a minute after the driver is
    gone, and the last test looks for them."""
    run = ClusterRun(
        tmp_path_factory.mktemp("run"),
        "killed",
        "tabletop_grpo",
        *flags(SMALL | ONE_ENV_WORKER | {"run.iterations": 50}),
    )
    run.wait_rows(1)
    run.process.kill()
    run.end()
    return run


def send(run: ClusterRun, number: signal.Signals, *workers: str) -> None:
    for worker in workers:
        os.kill(run.pid_of(worker), number)


def test_the_run_continues_unchanged_until_a_learner_dies(tmp_path):
    run = ClusterRun(tmp_path, "shaken", "tabletop_grpo", *flags(ONE_OF_EACH))
    train(load_config("tabletop_grpo", {**SMALL, "run.iterations": 4, "run.root": str(tmp_path), "run.name": "calm"}))
    run.wait_rows(1)
    send(run, signal.SIGKILL, "environments 0", "engine 0", "reward 0", "curriculum")
    run.wait_rows(2)
    for worker, limit_s in (("environments 1", ENV_LIMIT_S), ("engine 0", 2 * LIMIT_S)):
        hung = run.pid_of(worker)
        send(run, signal.SIGSTOP, worker)
        wait_for(lambda worker=worker, hung=hung: run.pid_of(worker) != hung, limit_s + SLACK_S)
    run.wait_rows(3)
    sent = time.monotonic()
    send(run, signal.SIGKILL, "learner 0")
    code, output = run.end()
    assert time.monotonic() - sent < SLACK_S
    assert code == 1
    assert re.search(r"learner 0 \(pid \d+ on \S+\) died", output), output
    assert run.left_running() == []

    ours, theirs = rows(run.folder), rows(tmp_path / "calm")[: run.num_rows()]
    num_retries = sum(row.pop("rollout/retried_episodes", 0) for row in ours)
    assert num_retries > 0 and not any(row.pop("rollout/retried_episodes", 0) for row in theirs)
    assert_equal_rows(ours, theirs)
    log = (run.folder / "logs" / "train.log").read_text()
    for what in (
        r"episode tabletop\S+ failed .* it is run again: environments 0 .* died",
        r"environments 1 \(pid \d+ on \S+\) has not replied to `\w+` in time: it hangs",
        r"engine 0 \(pid \d+ on \S+\) died .* It is replaced",
        r"engine 0 \(pid \d+ on \S+\) has not replied|engine 0 was lost in a sync",
        r"reward 0 \(pid \d+ on \S+\) died .* It is replaced",
        r"curriculum \(pid \d+ on \S+\) died .* It is replaced",
    ):
        assert re.search(what, log), f"{what}\n{log}"

    resume = re.search(r"resume from it with `vlarl train (--resume .*)`", output)
    assert resume, output
    two_ranks_resume_until_one_hangs(tmp_path, shlex.split(resume[1]))


def two_ranks_resume_until_one_hangs(root: Path, resume: list[str]) -> None:
    """The command in the message resumes the run of one rank, with the metrics of an undisturbed run."""
    ranks = ["--distributed.learners_per_node", "2", "--distributed.sharding", "full", "--run.iterations", "50"]
    ranks += flags(ONE_ENV_WORKER)
    run = ClusterRun(root, "shaken", *resume, *ranks)
    iteration = run.num_rows()
    run.wait_rows(iteration + 1)
    send(run, signal.SIGSTOP, "learner 1")
    sent = time.monotonic()
    code, output = run.end()
    assert time.monotonic() - sent < 2 * LIMIT_S + SLACK_S
    ours, theirs = (
        {
            key: value
            for key, value in rows(root / name)[iteration].items()
            if not key.startswith(("val/", "rollout/retried"))
        }
        for name in ("shaken", "calm")
    )
    assert ours["iteration"] == iteration
    assert_equal_rows([ours], [theirs])
    assert (
        code == 1
        and re.search(r"learner \d .*(hang|failed in)", output)
        and "resume from it with `vlarl train --resume" in output
    )
    assert run.left_running() == []


def test_a_full_object_store_ends_the_run_with_the_remedy(tmp_path):
    """Of images, which are kept for a reward that reads them."""
    options = (
        SMALL
        | ONE_ENV_WORKER
        | {
            "reward.source": "fakes.image_reward:brightness",
            "algorithm.name": "ppo",
            "rollout.num_groups": 16,
            "rollout.group_size": 1,
            "optim.minibatches": 4,
            "env.image_size": 640,
            "distributed.object_store_mb": 80,
            "distributed.timeout_s": 60,
        }
    )
    full_disk = {"RAY_local_fs_capacity_threshold": "0.001"}  # Ray believes that it can't spill
    run = ClusterRun(tmp_path, "full", "tabletop_ppo", *flags(options), variables=full_disk)
    code, output = run.end()
    assert code == 1, output
    assert "Ray's object store is full" in output and "raise distributed.object_store_mb" in output
    assert run.left_running() == []


SKEWED = SMALL | {
    "run.iterations": 50,
    "env.suite": "gym",
    "env.num_envs": 4,
    "env.max_steps": 100,
    "gym.env": "skewed_env:Skewed",
    "gym.kwargs": '{"sleep_s": 0.01}',  # 0.08 s, or 0.8 s for a quarter of the states
    "gym.images": ("pixels", "pixels"),
    "gym.instructions": ("wait",),
    "algorithm.name": "reinforce",
    "eval.interval": 2,  # so that rollouts are paused
    "distributed.asynchronous": True,
}
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_slow_and_fast_episodes_stay_within_the_staleness_until_ctrl_c_saves_and_leaves_nothing_running(tmp_path):
    """The bound is that of the decisions' own versions. What was outstanding is in the checkpoint."""
    options = {path: value for path, value in SKEWED.items() if path not in ("env.task_ids", "env.lockstep")}
    modules = {"PYTHONPATH": os.pathsep.join([BENCHMARKS, MODULES])}
    run = ClusterRun(tmp_path, "stopped", "tabletop_grpo", *flags(options), variables=modules)
    run.wait_rows(6)
    run.process.send_signal(signal.SIGINT)
    code, output = run.end()
    assert code == 130 and "interrupted and saved" in output, output
    assert run.left_running() == []
    trained = [row for row in rows(run.folder) if "train/staleness_max" in row]
    assert len(trained) >= 5 and max(row["train/staleness_max"] for row in trained) == 1.0
    assert any(row["rollout/groups_unfinished"] + row["rollout/groups_waiting"] > 0 for row in trained)
    newest = max((run.folder / "checkpoints").glob("step_*"))
    saved = json.loads((newest / "trainer.json").read_text())["open_episodes"]
    assert saved["next_batch"] > 1 and all(len(group["seeds"]) == 4 for group in saved["groups"])
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    syncs = [row for line in lines if (row := json.loads(line))["iteration"]]
    assert all(0 < row["sync/commit_seconds"] < row["sync/seconds"] for row in syncs), "engines decide meanwhile"


def test_nothing_outlives_a_driver_that_is_killed(killed):
    assert killed.left_running(90) == []
