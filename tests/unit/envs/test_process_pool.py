"""Environments as processes: the same episodes as anywhere, even if a process fails."""

import os
import signal
import time

import numpy as np
import pytest
from fakes.worker_envs import SPEC, CountingFactory

from vlarl.envs.base import ExpertFlaws, Record
from vlarl.envs.env_process import Chunk
from vlarl.envs.guardian import Guardian
from vlarl.envs.process_pool import WorkerError, WorkerPool, WorkerProcess
from vlarl.errors import UsageError, VlarlError
from vlarl.types import Task


@pytest.fixture
def pools():
    made: list[WorkerPool] = []

    def make(num_envs: int = 2, trouble: dict[str, int] | None = None, diary=None, **settings) -> WorkerPool:
        factory = CountingFactory(tuple((trouble or {}).items()), None if diary is None else str(diary))
        made.append(WorkerPool(factory, num_envs, **settings))
        return made[-1]

    yield make
    pids = [pid for pool in made for pid in pool.pids]
    for pool in made:
        pool.close()
    assert not [pid for pid in pids if alive(pid)], "a closed pool leaves no process"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def impatient(pool: WorkerPool, slot: int) -> None:
    """One second for each reply of a worker from now on. It has started, which on a busy machine takes longer."""
    pool._workers[slot]._timeout_s = 1.0


def task(task_id: int = 0, state: int = 0, seed: int = 0) -> Task:
    return Task("counting", task_id, state, seed)


def ones(rows: int, steps: int) -> np.ndarray:
    return np.ones((rows, steps, 2), np.float32)


def test_a_chunk_runs_to_the_first_end_and_is_looked_at_once(pools, tmp_path):
    pool = pools(1, diary=tmp_path / "diary")
    (first,) = pool.reset([0], [task(0, 2)])
    assert first.instruction == "count to 5" and first.images.shape == (1, 4, 6, 3) and first.images.max() == 0
    np.testing.assert_array_equal(first.proprio[:2], [0, 2])
    (outcome,) = pool.step_chunk([0], ones(1, 3))
    assert (outcome.num_executed, outcome.terminated, outcome.truncated) == (3, False, False)
    assert outcome.rewards.tolist() == [1, 2, 3] and outcome.frames == () and outcome.error is None
    (outcome,) = pool.step_chunk([0], ones(1, 4))
    assert (outcome.num_executed, outcome.terminated, outcome.truncated, outcome.success) == (2, True, False, True)
    assert outcome.rewards.tolist() == [4, 5, 0, 0] and outcome.observation.images.max() == 5
    assert first.images.max() == 0, "what was handed out stays as it was"
    assert [line.split()[1] for line in (tmp_path / "diary").read_text().splitlines()] == [
        "built", "reset", "observe", "observe", "observe",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match=r"slots \[0\] run no episode"):
        pool.step_chunk([0], ones(1, 1))


def test_the_suites_time_limit_is_kept_and_an_environments_own(pools):
    pool = pools(1)
    pool.reset([0], [task()])
    (outcome,) = pool.step_chunk([0], np.zeros((1, 20, 2), np.float32))
    assert (outcome.num_executed, outcome.terminated, outcome.truncated) == (12, False, True)
    pool = pools(1, {"truncate": 4})
    pool.reset([0], [task()])
    (outcome,) = pool.step_chunk([0], np.zeros((1, 20, 2), np.float32))
    assert (outcome.num_executed, outcome.truncated, outcome.success) == (4, True, False)


def test_recorded_frames(pools):
    pool = pools(2)
    pool.send_reset([0, 1], [task(0), task(1)], Record(frozenset({1})))
    outcomes = {}
    while len(outcomes) < 2:
        outcomes.update(pool.receive())
    assert outcomes[0].frames == () and [int(f.max()) for f in outcomes[1].frames] == [100]
    plain, recorded = pool.step_chunk([0, 1], ones(2, 2), Record(frozenset({1})))
    assert plain.frames == () and [int(f.max()) for f in recorded.frames] == [101, 102]
    assert int(pool.frame(0).max()) == 102


def test_recorded_steps(pools):
    pool = pools(2)
    first = pool.reset([0, 1], [task(0), task(0)])[1]
    plain, recorded = pool.step_chunk([0, 1], ones(2, 9), Record(steps=frozenset({1})))
    assert plain.passed == () and recorded.frames == () and recorded.success and recorded.num_executed == 5
    seen = [first, *recorded.passed, recorded.observation]
    assert [int(each.images.max()) for each in seen] == [int(first.images.max()) + k for k in range(6)]


def test_only_lockstep_waits_for_the_slowest(pools):
    pool = pools(2)
    pool.reset([0, 1], [task(), task()])
    os.kill(pool.pids[0], signal.SIGSTOP)
    pool.send_chunk([0, 1], ones(2, 1))
    assert [slot for slot, _ in pool.receive()] == [1]
    os.kill(pool.pids[0], signal.SIGCONT)
    assert [slot for slot, _ in pool.receive()] == [0]
    together = pools(2, lockstep=True)
    together.reset([0, 1], [task(), task()])
    together.send_chunk([0, 1], ones(2, 1))
    assert [slot for slot, _ in together.receive()] == [0, 1]
    with pytest.raises(RuntimeError, match="nothing was sent"):
        together.receive()


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("die", "was killed by SIGKILL"),
        ("raise", "the environment raised ArithmeticError: the joints exploded"),
        ("exit", "exit code 3\n    a last word"),
        ("sys.exit", "the environment called sys.exit(3)"),
    ],
)
def test_a_worker_that_fails_says_why_and_is_replaced(pools, tmp_path, trouble, reason):
    pool = pools(2, {trouble: 2}, tmp_path / "diary")
    pool.reset([0, 1], [task(), task()])
    before = pool.pids
    pool.send_chunk([0], ones(1, 3))
    ((slot, outcome),) = pool.receive()
    assert slot == 0 and reason in (outcome.error or "")
    assert pool.pids[0] != before[0] and pool.pids[1] == before[1] and not alive(before[0])
    pool.reset([0], [task()])
    (outcome,) = pool.step_chunk([0], ones(1, 3))
    assert outcome.error is None and outcome.num_executed == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (
            {"nan reward": 2},
            "the environment returned NaN as reward, in step 2 of episode counting-t00-s000-0000000000",
        ),
        (
            {"nan state": 3},
            "the environment returned infinity in dimension 1 of the robot's state, in step 3 of episode counting-t00",
        ),
        (
            {"nan state": 0},
            "in dimension 1 of the robot's state, at the reset of episode counting-t00-s000-00000000000",
        ),
        (
            {"success": 1},
            "info['success']: the environment returned 'no'; it must be True, False, 0 or 1, in step 1 of",
        ),
    ],
)
def test_what_an_environment_must_not_return_costs_the_episode_and_is_named(pools, tmp_path, trouble, reason):
    pool = pools(1, trouble, tmp_path / "diary")
    pool.send_reset([0], [task()])
    ((_, outcome),) = pool.receive()
    if outcome.error is None:
        pool.send_chunk([0], ones(1, 3))
        ((_, outcome),) = pool.receive()
    assert reason in str(outcome.error) and "Traceback" not in str(outcome.error)
    assert pool.reset([0], [task()])[0].proprio[0] == 0, "the slot continues with the next attempt"


@pytest.mark.timeout(60)
def test_a_worker_that_hangs_is_replaced_within_its_time(pools, tmp_path):
    pool = pools(1, {"hang": 2}, tmp_path / "diary")
    pool.reset([0], [task()])
    impatient(pool, 0)
    before = time.monotonic()
    (outcome,) = pool.step_chunk([0], ones(1, 3))
    assert time.monotonic() - before >= 1.0 and "did not reply within 1 s" in (outcome.error or "")
    pool.reset([0], [task()])
    assert pool.step_chunk([0], ones(1, 3))[0].error is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("half a length", "stopped in the middle of a reply and has not finished it within 1 s"),
        ("half a message", "stopped in the middle of a reply and has not finished it within 1 s"),
        ("dripping", "stopped in the middle of a reply and has not finished it within 1 s"),
        ("no pickle", "sent an invalid reply"),
        ("no reply", "sent an invalid reply"),
        ("a length without end", "sent an invalid reply"),
    ],
)
def test_a_worker_that_hangs_in_the_middle_of_a_message_or_sends_nonsense_is_replaced(pools, tmp_path, trouble, reason):
    pool = pools(2, {trouble: 2}, tmp_path / "diary")
    pool.reset([0, 1], [task(), task()])
    impatient(pool, 0)
    before = pool.pids
    (outcome,) = pool.step_chunk([0], ones(1, 3))
    assert reason in (outcome.error or "") and str(before[0]) in (outcome.error or "")
    assert pool.pids[0] != before[0] and pool.pids[1] == before[1] and not alive(before[0])
    assert pool.step_chunk([1], ones(1, 2))[0].error is None, "the others continue"
    pool.reset([0], [task()])
    (outcome,) = pool.step_chunk([0], ones(1, 3))
    assert outcome.error is None and outcome.num_executed == 3


@pytest.mark.timeout(60)
def test_sending_to_a_worker_that_no_longer_listens_has_a_deadline():
    """The message does not fit into the pipe, and the worker is stopped before it reads any of it."""
    guardian = Guardian()
    worker = WorkerProcess(CountingFactory(), 0, timeout_s=1.0, guardian=guardian)
    try:
        os.kill(worker.pid, signal.SIGSTOP)
        worker.send(Chunk(np.zeros((1 << 20, 2), np.float32), record=False))
        with pytest.raises(WorkerError, match=r"did not reply within 1 s and was stopped"):
            worker.receive()
    finally:
        worker.kill()
        guardian.close()
    assert not alive(worker.pid)


@pytest.mark.timeout(60)
def test_a_reply_larger_than_the_pipe_arrives_complete_however_late_it_is_read(pools):
    """The worker can't send all of it before it is read, and it is read after it was due."""
    pool = pools(1, {"large": 256}, timeout_s=10.0)
    pool.reset([0], [task()])
    worker = pool._workers[0]
    pool.send_chunk([0], np.zeros((1, 12, 2), np.float32), Record(frozenset({0})))
    assert worker.connection.poll(30)
    worker.deadline = time.monotonic() - 1.0
    ((_, outcome),) = pool.receive()
    assert outcome.error is None and [int(f.max()) for f in outcome.frames] == list(range(101, 113))


def test_what_a_user_must_fix_ends_the_run_at_once(pools):
    with pytest.raises(UsageError, match="the assets are missing: fetch them"):
        pools(1, {"refuse": 1}).reset([0], [task()])


def test_a_reset_that_fails_is_an_error_with_its_reason(pools, tmp_path):
    with pytest.raises(
        VlarlError, match=r"in slot 0: the environment raised ValueError: .* promised uint8\[1, 4, 6, 3\]"
    ):
        pools(1, {"shape": 1}).reset([0], [task()])


def test_the_experts_play_in_the_order_of_the_tasks(pools, tmp_path):
    tasks = [task(i % 4, i % 3, seed=i) for i in range(8)]
    played = list(pools(2, {"die": 4}, tmp_path / "diary").demonstrate(tasks, ExpertFlaws(action_noise=0.1)))
    assert [demo.task for demo in played] == tasks
    for demo in played:
        assert demo.success and demo.instruction == SPEC.tasks[demo.task.task_id].instruction
        assert demo.images.shape == (len(demo.actions), 1, 4, 6, 3) and demo.images[:, 0, 0, 0, 0].tolist() == list(
            range(len(demo.actions))
        )
        np.testing.assert_array_equal(demo.actions, [[1.0, demo.task.init_state]] * len(demo.actions))
        assert demo.proprio[-1, 0] != round(float(demo.proprio[-1, 0])), "executed with noise, noted without"
    (alone,) = pools(1).demonstrate(tasks[3:4], ExpertFlaws(action_noise=0.1))
    np.testing.assert_array_equal(alone.proprio, played[3].proprio)


def test_an_expert_that_always_fails_is_an_error(pools, tmp_path):
    pool = pools(1, {"raise": 2, "always": 1}, tmp_path / "diary")
    with pytest.raises(
        VlarlError, match="can't be played: the environment raised ArithmeticError: the joints exploded"
    ):
        list(pool.demonstrate([task()], ExpertFlaws(), retries=1))


def test_workers_end_when_their_trainer_is_killed(tmp_path):
    import subprocess
    import sys

    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fakes.worker_envs import CountingFactory\n"
        "from vlarl.envs.process_pool import WorkerPool\n"
        "from vlarl.types import Task\n"
        "pool = WorkerPool(CountingFactory((('hang', 1),), sys.argv[2]), 2)\n"
        "pool.reset([0, 1], [Task('counting', 0, 0, 0)] * 2)\n"
        "import numpy; pool.send_chunk([0], numpy.ones((1, 2, 2), numpy.float32))\n"
        "print(*pool.pids, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    tests = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, tests, str(tmp_path / "diary")], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    trainer.kill()
    trainer.communicate()
    limit = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids), "an idle one and a hanging one"


def test_the_time_that_simulators_work_is_counted(pools):
    pool = pools(2)
    pool.reset([0, 1], [task(), task()])
    before = pool.busy_s
    began = time.monotonic()
    pool.step_chunk([0], ones(1, 2))
    assert 0 < pool.busy_s - before <= time.monotonic() - began
    assert pool.num_cores == len(os.sched_getaffinity(0))
