"""The memory of a run: what it writes down, and what it saves when the run fails; with a learner and a store by hand."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.eval_records import episode

from vlarl import loop
from vlarl.callbacks import Callbacks, EpisodeRecord
from vlarl.config.schema import Config
from vlarl.errors import (
    ClusterError,
    DivergedError,
    LearnersLostError,
    RowsLostError,
    UsageError,
    VlarlError,
    WorkerFailedError,
    WorkerLostError,
)
from vlarl.interrupt import Interrupted
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace
from vlarl.run.session import Session
from vlarl.training.state import TrainerState
from vlarl.types import EvalResult, Rollout, Trajectory, UpdateResult


class FakeLearner:
    """Knows how often it was updated."""

    def __init__(self) -> None:
        self.policy = None
        self.version = 0


class FakeStore:
    """Notes what it was given: the name, the learner's version and the counters."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int, TrainerState]] = []
        self.policies: list[str] = []
        self.metadata: dict[str, object] = {}
        self.error: Exception | None = None

    def save(self, name: str, learner: FakeLearner, state: TrainerState) -> Path:
        if self.error is not None:
            raise self.error
        self.saved.append((name, learner.version, state))
        return Path(name)

    def save_policy(self, name: str, policy: object, metadata: dict[str, object]) -> Path:
        self.policies.append(name)
        self.metadata = metadata
        return Path(name)


class Run:
    """A session, and what the loop does with it."""

    def __init__(
        self,
        folder: Path,
        state: TrainerState | None = None,
        callbacks: Callbacks = Callbacks(),  # noqa: B008 - it has no state
        **sections: dict[str, object],
    ) -> None:
        logging = {"tensorboard": False, "report": False}
        sections = {"run": {"iterations": 20}, "checkpoint": {"interval": 5}, "logging": logging} | sections
        self.config = Config.model_validate(sections)
        self.directory = RunDirectory.create(folder, "run")
        self.learner, self.store = FakeLearner(), FakeStore()
        self.session = Session(
            self.config,
            self.directory,
            self.learner,
            self.store,
            state or TrainerState(),
            self.directory.lock(),
            NoTrace(),
            callbacks=callbacks,
        )

    def collect(self, *trajectories: Trajectory) -> None:
        iteration = self.session.start_iteration()
        env_steps = sum(t.length for t in trajectories)
        self.session.record_rollout(Rollout(iteration, trajectories, (), {}, {"dealt": iteration}, {}, {}, env_steps))

    def update(self) -> None:
        self.session.start_update()
        self.learner.version += 1
        self.session.record_update(UpdateResult({"policy_loss": 0.5}, 4, 2))

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.collect()
            self.update()
            self.session.keep({"train/policy_loss": 0.5})
            self.session.end_iteration({"train/policy_loss": 0.5})

    def status(self) -> dict[str, object]:
        return self.directory.read_status()


def fail(run: Run, error: BaseException, work: Callable[[], None] = lambda: None) -> BaseException:
    """What comes out of a session in which this is raised after the work."""
    with pytest.raises(type(error) if not isinstance(error, VlarlError) else VlarlError) as caught, run.session:
        work()
        raise error
    return caught.value


def put_checkpoints(run: Run, **iterations: object) -> None:
    """Lay checkpoints down, by name with their iterations."""
    for name, iteration in iterations.items():
        folder = run.directory.checkpoints / name
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_text(json.dumps({"iteration": iteration}))


# What is written down


@pytest.mark.parametrize(
    ("rates", "before", "after"),
    [({}, None, None), ({0: 0.2}, 0.2, None), ({0: 0.2, 5: 0.4, 10: 0.6}, 0.2, 0.6), ({5: 0.4}, None, 0.4)],
)
def test_success_after_training_is_that_of_a_later_evaluation_alone(tmp_path, rates, before, after):
    run = Run(tmp_path)
    rows = [{"iteration": iteration, "val/success_rate": rate} for iteration, rate in rates.items()]
    run.directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run.session.summary()
    assert (summary.success_before, summary.success_after) == (before, after)


def test_an_evaluation_leaves_crashes_out_of_its_rates(tmp_path, capsys):
    run = Run(tmp_path, TrainerState(iteration=4))
    run.learner.version = 9
    result = EvalResult((episode(0, 1, True, length=4), episode(0, 2, False, length=8), episode(0, 3, None, length=99)))
    with run.session as session:
        assert session.record_evaluation(result) == {
            "val/success_rate": 0.5,
            "val/mean_reward": 0.5,
            "val/std_reward": 0.5,
            "val/mean_length": 6.0,
            "val/crashed": 1.0,
            "val/reward_failures": 0.0,
        }
    rows = [json.loads(line) for line in run.directory.episodes_file.read_text().splitlines()]
    assert [(r["iteration"], r["phase"], r["policy_version"], r["status"]) for r in rows] == [
        (4, "eval", 9, "ok"),
        (4, "eval", 9, "ok"),
        (4, "eval", 9, "crashed"),
    ]
    output = capsys.readouterr().out
    assert "1 of 3 evaluated episodes could not be run" in output
    assert "evaluation after iteration 4: success 50.0% of 2 episodes" in output


def test_returns_of_episodes_that_could_not_be_run_or_scored_do_not_make_a_policy_the_best(tmp_path, trajectory):
    good, bad = trajectory([[1.0]]), trajectory([[0.5]])
    with Run(tmp_path).session as session:
        run_store = session.store
        session.record_rollout(Rollout(1, (bad,), (), {}, {}, {}, {}, 1))
        assert session.state.ema_return == 0.5 and run_store.policies == ["best_return"]
        unscored = (replace(good, status="crashed"), replace(good, status="reward_failed"))
        session.record_rollout(Rollout(2, unscored, (), {}, {}, {}, {}, 1))
        assert session.state.ema_return == 0.5 and run_store.policies == ["best_return"]
        session.record_rollout(Rollout(3, (good, replace(bad, status="crashed")), (), {}, {}, {}, {}, 1))
        assert run_store.policies == ["best_return", "best_return"]
        assert session.state.episodes == 5, "they were run, all the same"


def test_the_best_policy_says_how_often_it_was_updated_apart_from_the_critics_warm_up(tmp_path, trajectory):
    run = Run(tmp_path, algorithm={"name": "ppo", "value_init_steps": 2})
    with run.session as session:
        for version, updates in ((1, 0), (3, 1)):
            run.learner.version = version
            session.record_rollout(Rollout(version + 1, (trajectory([[float(version)]]),), (), {}, {}, {}, {}, 1))
            assert (run.store.metadata["training_step"], run.store.metadata["policy_updates"]) == (version, updates)


# A run that fails


@pytest.mark.parametrize(
    "error",
    [VlarlError("the reward is down"), ClusterError("no machines"), WorkerLostError("engine 0 died", "engine 0")],
)
def test_a_failure_between_two_updates_saves_the_last_whole_iteration(tmp_path, error):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(2)
        run.collect()

    raised = fail(run, error, work)
    ((name, version, state),) = run.store.saved
    assert (name, version) == ("step_000002", 2)
    assert (state.iteration, state.optimizer_steps, state.sampler, state.unfinished) == (2, 4, {"dealt": 2}, {})
    assert str(raised).startswith(f"{error}\n") and raised.__cause__ is error
    assert "newest checkpoint is of iteration 2" in str(raised)
    assert f"resume from it with `vlarl train --resume {run.directory.path}`" in str(raised)
    status = run.status()
    assert status["state"] == "failed" and "newest checkpoint is of iteration 2" in str(status["message"])


def test_a_failure_after_the_update_saves_that_update_with_the_row_that_is_still_to_be_written(tmp_path):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(2)
        run.collect()
        run.update()
        run.session.keep({"train/policy_loss": 0.25})

    raised = fail(run, VlarlError("the simulator is gone"), work)
    ((name, version, state),) = run.store.saved
    assert (name, version) == ("step_000003", 3)
    assert (state.iteration, state.optimizer_steps) == (3, 6)
    assert state.unfinished == {"train/policy_loss": 0.25}
    assert "newest checkpoint is of iteration 3" in str(raised)


def test_a_failure_in_the_middle_of_an_update_saves_nothing(tmp_path):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(7)
        run.collect()
        run.session.start_update()
        run.learner.version += 1  # weights have moved

    raised = fail(run, VlarlError("out of memory"), work)
    assert [name for name, _, _ in run.store.saved] == ["step_000005"]
    assert "in the middle of an update" in str(raised) and "newest checkpoint is of iteration 5" in str(raised)


@pytest.mark.parametrize("kind", [WorkerLostError, WorkerFailedError])
def test_lost_learners_are_not_asked_to_save(tmp_path, kind):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(6)
        run.store.error = AssertionError("it would wait for a rank that is gone")

    lost = kind("learner 1 died", "learner 1")
    behind = VlarlError("the evaluation failed")
    behind.__cause__ = lost
    raised = fail(run, behind, work)
    assert "can't save" in str(raised) and "newest checkpoint is of iteration 5" in str(raised)
    assert [name for name, _, _ in run.store.saved] == ["step_000005"]


TWO_LEARNERS = {"distributed": {"backend": "ray", "learners_per_node": (2,), "restarts": 3}}
ONE_LEARNER = {"distributed": {"backend": "ray", "restarts": 3}}


@pytest.mark.parametrize(
    ("kind", "worker", "sections", "is_restarted"),
    [
        (WorkerLostError, "learner 1", TWO_LEARNERS, True),
        (WorkerFailedError, "learner 1", TWO_LEARNERS, True),  # it waited for the one that is lost
        (WorkerLostError, "learner 0", ONE_LEARNER, True),
        (WorkerFailedError, "learner 0", ONE_LEARNER, False),
        (WorkerLostError, "engine 0", TWO_LEARNERS, False),
    ],
)
def test_lost_learners_may_be_started_again(tmp_path, capsys, kind, worker, sections, is_restarted):
    run = Run(tmp_path, **sections)
    run.session.restart = 2
    lost = VlarlError("the evaluation failed")
    lost.__cause__ = kind(f"{worker} died", worker)
    raised = fail(run, lost, lambda: run.iterate(6))
    assert isinstance(raised, LearnersLostError) == is_restarted
    assert (run.status()["state"] == "failed") != is_restarted
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"{worker} was lost: the learners are started again from the newest checkpoint (restart 2 of 3)" in shown
    ) == (is_restarted)


def test_observations_that_learners_miss_start_them_again(tmp_path, capsys):
    run = Run(tmp_path, **ONE_LEARNER)
    run.session.restart = 1
    raised = fail(
        run, RowsLostError("processed observations are lost with their machine", "ab12"), lambda: run.iterate(6)
    )
    assert isinstance(raised, LearnersLostError) and "observations are lost" in str(raised)
    assert "a part of the rollout was lost: the learners are started again" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("sections", "in_update", "saved"),
    [
        (ONE_LEARNER, False, ["step_000005", "step_000006"]),
        (ONE_LEARNER, True, ["step_000005"]),  # weights of no iteration
        (TWO_LEARNERS, False, ["step_000005"]),  # one waits for the other, which missed the observations
    ],
)
@pytest.mark.parametrize("restart", [0, 1])
def test_learners_that_miss_observations_save_first_if_they_can(tmp_path, sections, in_update, saved, restart):
    run = Run(tmp_path, **sections)
    run.session.restart = restart

    def work():
        run.iterate(6)
        if in_update:
            run.collect()
            run.session.start_update()

    raised = fail(run, RowsLostError("processed observations are lost with their machine", "ab12"), work)
    assert [name for name, _, _ in run.store.saved] == saved
    assert isinstance(raised, LearnersLostError) == (restart > 0)
    if not restart:
        assert f"The newest checkpoint is of iteration {len(saved) + 4}" in str(raised)


def test_a_restart_is_not_lost_over_a_checkpoint_that_can_not_be_written(tmp_path):
    run = Run(tmp_path, **ONE_LEARNER)
    run.session.restart = 1

    def work():
        run.iterate(6)
        run.store.error = OSError("the disk is full")

    assert isinstance(fail(run, RowsLostError("observations are lost", "ab12"), work), LearnersLostError)


def test_learners_that_can_not_be_started_again_end_the_run_with_both_reasons(tmp_path):
    run = Run(tmp_path, **TWO_LEARNERS)
    run.session.restart = 1
    lost = fail(run, WorkerLostError("learner 1 died", "learner 1"), lambda: run.iterate(6))
    with pytest.raises(ClusterError) as ended, run.session.restarting(lost):
        raise UsageError("distributed: 2 learners take 2 CPUs; 1 CPU missing.")
    for words in (
        "learner 1 died",
        "could not be started again: distributed: 2 learners",
        "of iteration 5",
        "--resume",
    ):
        assert words in str(ended.value)
    assert run.status()["state"] == "failed" and "1 CPU missing" in str(run.status()["message"])


@pytest.mark.parametrize("restarts", [0, 2])
def test_learners_are_started_again_as_often_as_configured(tmp_path, monkeypatch, restarts):
    opened, numbers = [], []
    config = Config.model_validate({"distributed": {"backend": "ray", "restarts": restarts}})

    def open_run(config, resume, checkpoint, callbacks):
        opened.append((resume, checkpoint))
        return None, Run(tmp_path / str(len(opened)), **TWO_LEARNERS).session

    def run(parts, session):
        numbers.append(session.restart)
        raise LearnersLostError("learner 0 died") if session.restart else ClusterError("learner 0 died for good")

    monkeypatch.setattr(loop, "open_run", open_run)
    monkeypatch.setattr(loop, "run", run)
    with pytest.raises(ClusterError, match="for good"):
        loop.train(config, Path("mine"), Path("chosen"))
    assert numbers == [*range(1, restarts + 1), 0]
    assert opened == [
        (Path("mine"), Path("chosen")),
        *((tmp_path / str(n) / "run", None) for n in range(1, restarts + 1)),
    ]


def test_a_policy_that_diverged_is_not_saved(tmp_path):
    """It would be the newest checkpoint, and push a good one out."""
    run = Run(tmp_path)
    raised = fail(run, DivergedError("the policy's action probabilities are not finite"), lambda: run.iterate(7))
    assert [name for name, _, _ in run.store.saved] == ["step_000005"]
    assert "weights that diverged were not saved" in str(raised)
    assert "newest checkpoint is of iteration 5" in str(raised)
    assert "--from" not in str(raised)  # nothing earlier is there


def test_a_policy_that_diverged_names_the_checkpoint_before_the_newest_one(tmp_path):
    run = Run(tmp_path)
    put_checkpoints(run, step_000004=4, step_000005=5)
    raised = fail(run, DivergedError("the weights are absurd"), lambda: run.iterate(7))
    assert f"--resume {run.directory.path} --from step_000004`; there are step_000004, step_000005." in str(raised)
    other = Run(tmp_path / "other")
    assert "--from" not in str(fail(other, VlarlError("the disk went away"), lambda: other.iterate(7)))


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"step_000005": 5}, None),
        ({"step_000005": 5, "step_000003": "x", "step_000009": 9}, None),
        ({"step_000005": 5, "final": 4, "step_000003": 3}, "final`; there are final, step_000003, step_000005."),
        ({"step_000005": 5, "final": 2, "step_000003": 3}, "step_000003`; there are final, step_000003, step_000005."),
    ],
)
def test_what_a_divergence_goes_back_to_is_there_and_earlier(tmp_path, there, named):
    run = Run(tmp_path)
    put_checkpoints(run, **there)
    (run.directory.checkpoints / "step_000004").mkdir()  # without counters nothing resumes from it
    raised = fail(run, DivergedError("the weights are absurd"), lambda: run.iterate(7))
    assert "Lower optim.lr" in str(raised)
    assert (f"--from {named}" in str(raised)) if named else ("--from" not in str(raised))


@pytest.mark.parametrize("code", [0, 3, "enough"])
def test_code_of_the_user_that_exits_is_a_failure(tmp_path, code):
    run = Run(tmp_path)
    with pytest.raises(VlarlError, match=rf"calls called sys.exit\({code!r}\)") as caught, run.session:
        run.iterate(1)
        raise SystemExit(code)
    assert caught.value.exit_code == 1 and "resume" in str(caught.value)
    assert run.status()["state"] == "failed" and [name for name, _, _ in run.store.saved] == ["step_000001"]


def test_a_full_disk_is_one_message_whoever_wrote(tmp_path):
    """Such as a library that knows nothing of ours."""
    run = Run(tmp_path)
    message = r"cannot write .*video.mp4: the disk is full \(.* MiB free in"
    with pytest.raises(VlarlError, match=message) as caught, run.session:
        run.iterate(1)
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "video.mp4"))
    assert "newest checkpoint is of iteration 1" in str(caught.value)


def test_a_status_that_can_not_be_written_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path)

    def full(*_: object) -> None:
        raise VlarlError("cannot write status.json: the disk is full")

    with pytest.raises(VlarlError, match="the reward is gone"), run.session:
        run.iterate(1)
        monkeypatch.setattr(type(run.directory), "write_status", full)
        raise VlarlError("the reward is gone")


def test_what_an_error_says_without_end_is_cut_in_the_status(tmp_path):
    run = Run(tmp_path)
    fail(run, ValueError("x" * 50_000_000))
    assert len(str(run.status()["message"])) < 6000
    assert run.directory.log_file.stat().st_size < 40_000


def test_the_first_lines_of_a_session_are_shown(tmp_path, capsys):
    run = Run(tmp_path)
    run.session._opening = ("resuming from checkpoint step_000002, after iteration 2",)
    with run.session:
        pass
    assert "resuming from checkpoint step_000002, after iteration 2\n" in capsys.readouterr().out


def test_an_update_without_a_single_step_leaves_a_state_that_is_saved(tmp_path):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(7)
        run.collect()
        run.session.start_update()
        run.session.refuse_update()

    raised = fail(run, VlarlError("not finite in any step"), work)
    assert [name for name, _, _ in run.store.saved] == ["step_000005", "step_000007"]
    assert "newest checkpoint is of iteration 7" in str(raised)


def test_a_save_that_fails_does_not_hide_why_the_run_failed(tmp_path):
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(6)
        run.store.error = VlarlError("cannot write: the disk is full")

    raised = fail(run, VlarlError("the reward is down"), work)
    assert str(raised).startswith("the reward is down\n")
    assert "iteration, 6, could not be saved (cannot write: the disk is full)" in str(raised)
    assert "newest checkpoint is of iteration 5" in str(raised)


def test_what_is_no_error_of_vlarls_keeps_its_type_and_has_a_note(tmp_path):
    run = Run(tmp_path)
    raised = fail(run, ZeroDivisionError("in a reward"), lambda: run.iterate(1))
    assert [name for name, _, _ in run.store.saved] == ["step_000001"]
    assert "newest checkpoint is of iteration 1" in raised.__notes__[0]


def test_an_error_of_usage_keeps_its_exit_code(tmp_path):
    assert fail(Run(tmp_path), UsageError("no such option")).exit_code == 2


def test_before_anything_is_learnt_there_is_nothing_to_save(tmp_path):
    run = Run(tmp_path)
    raised = fail(run, VlarlError("the reward is down"), run.collect)
    assert run.store.saved == []
    assert f"`vlarl train --resume {run.directory.path}` starts again at iteration 1" in str(raised)


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    run = Run(tmp_path)
    fail(run, VlarlError("the reward is down"), lambda: run.iterate(5))
    assert [name for name, _, _ in run.store.saved] == ["step_000005"]


def test_a_periodic_save_that_fails_is_tried_again(tmp_path):
    """It is not taken for one that succeeded."""
    run = Run(tmp_path)

    def work() -> None:
        run.iterate(4)
        run.store.error = OSError("busy")
        try:
            run.iterate(1)
        finally:
            run.store.error = None

    with pytest.raises(OSError, match="busy"), run.session:
        work()
    assert [(name, version) for name, version, _ in run.store.saved] == [("step_000005", 5)]


def test_rollouts_that_wait_for_their_update_are_not_counted(tmp_path):
    run = Run(tmp_path, optim={"rollouts_per_update": 2})

    def work() -> None:
        run.iterate(2)
        run.collect()
        run.session.keep({"train/waiting_trajectories": 1.0})
        run.session.end_iteration({"train/waiting_trajectories": 1.0})

    fail(run, VlarlError("the reward is down"), work)
    ((name, version, state),) = run.store.saved
    assert (name, version, state.iteration, state.unfinished) == ("step_000002", 2, 2, {})


def test_an_interrupt_saves_and_is_no_error(tmp_path):
    run = Run(tmp_path)
    with run.session as session:
        run.iterate(2)
        raise Interrupted
    assert [name for name, _, _ in run.store.saved] == ["step_000002"] and session.interrupted
    assert run.status()["state"] == "interrupted"


def test_an_interrupt_that_finds_the_weights_diverged_is_a_failure(tmp_path):
    run = Run(tmp_path)
    put_checkpoints(run, step_000004=4, step_000005=5)
    with pytest.raises(VlarlError, match="the weights are absurd") as caught, run.session as session:
        run.iterate(7)
        run.store.error = DivergedError("the weights are absurd")
        raise Interrupted
    assert "weights that diverged were not saved" in str(caught.value)
    assert "--from step_000004`" in str(caught.value) and not session.interrupted
    assert run.status()["state"] == "failed" and "--from step_000004" in str(run.status()["message"])


# How long it takes


def test_environment_steps_end_a_run_and_say_how_many_iterations_it_takes(tmp_path, trajectory):
    run = Run(tmp_path, run={"iterations": None, "total_env_steps": 5})
    episodes = [trajectory([[0.0], [0.0]])]  # two steps
    with run.session as session:
        assert not session.schedule.finished(session.state)
        seen = []
        while not session.schedule.finished(session.state):
            run.collect(*episodes)
            run.update()
            session.end_iteration({})
            seen.append(
                (session.state.iteration, session.schedule.total_iterations(session.state), run.status()["iterations"])
            )
    assert seen == [(1, 3, 3), (2, 3, 3), (3, 3, 3)]
    assert session.state.env_steps == 6


def test_iterations_end_a_run_that_has_steps_left(tmp_path):
    run = Run(tmp_path, run={"iterations": 2, "total_env_steps": 1000})
    with run.session as session:
        run.iterate(2)
        assert session.schedule.finished(session.state)


# What a user's own functions are told


def test_callbacks_are_told_of_every_episode_and_of_every_row(tmp_path, trajectory):
    iterations, episodes = [], []
    run = Run(tmp_path, callbacks=Callbacks(iterations.append, episodes.append))
    scored = trajectory([[0.5], [1.0]], success=True)
    evaluated = replace(episode(0, 3, False), frames=(np.zeros((8, 8, 3), np.uint8),))
    with run.session as session:
        session.end_iteration(session.record_evaluation(EvalResult((evaluated,))))
        run.collect(scored)
        session.end_iteration({"train/policy_loss": 0.5})
    rows = run.directory.read_metrics()
    assert [record.iteration for record in iterations] == [0, 1]
    assert iterations[1].metrics["train/policy_loss"] == 0.5 and iterations[0].run_dir == run.directory.path
    assert [set(record.metrics) | {"iteration", "time"} for record in iterations] == [set(row) for row in rows]
    first, second = episodes
    assert first == EpisodeRecord(0, "eval", replace(evaluated, frames=())) and first.result.frames == ()
    assert (second.iteration, second.phase, second.trajectory) == (1, "rollout", scored)
    assert (second.result.episode_return, second.result.success) == (1.5, True)


@pytest.mark.parametrize("error", [ValueError("too low"), SystemExit(3), BaseException("too odd")])
def test_a_callback_that_raises_ends_the_run_saved_and_named(tmp_path, error):
    def stop(record):
        if record.iteration == 3:
            raise error

    run = Run(tmp_path, callbacks=Callbacks(on_iteration=stop))
    with pytest.raises(VlarlError) as caught, run.session:
        run.iterate(4)
    said = str(caught.value)
    assert (
        f"the callback on_iteration (test_session.{stop.__qualname__}) raised {type(error).__name__}: {error}" in said
    )
    assert "(test_session.py, line " in said and "The newest checkpoint is of iteration 3" in said
    assert [(name, state.iteration) for name, _, state in run.store.saved] == [("step_000003", 3)]
    assert run.status()["state"] == "failed" and "on_iteration" in run.status()["message"]


def test_a_callback_may_be_interrupted_as_the_loop_is(tmp_path):
    def interrupted(record):
        raise Interrupted

    run = Run(tmp_path, callbacks=Callbacks(on_episode=interrupted))
    with run.session as session:
        session.record_evaluation(EvalResult((episode(0, 1, True),)))
    assert run.session.interrupted


def test_a_reward_that_fails_in_an_evaluation_is_counted_and_told(tmp_path, capsys):
    run = Run(tmp_path)
    failed = replace(episode(0, 2, True), episode_return=0.0, reward_error="ValueError: no")
    with run.session as session:
        row = session.record_evaluation(EvalResult((replace(episode(0, 1, True), episode_return=0.25), failed)))
    assert (row["val/reward_failures"], row["val/mean_reward"], row["val/success_rate"]) == (1.0, 0.25, 1.0)
    assert "the reward failed on 1 of 2 evaluated episodes" in capsys.readouterr().out


def test_videos_of_an_evaluation_go_to_the_sinks(tmp_path):
    shown = []
    run = Run(tmp_path)
    recorded = replace(episode(0, 3, True), frames=(np.zeros((64, 64, 3), np.uint8),) * 2)
    with run.session as session:
        session.metrics.show = lambda iteration, videos: shown.append((iteration, [v.path.name for v in videos]))
        session.record_evaluation(EvalResult((recorded, episode(0, 4, True))))
    assert shown == [(0, ["iter_0000_task00_state03_success.mp4"])]
