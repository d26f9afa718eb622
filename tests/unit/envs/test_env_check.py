"""The contract's checker: a correct environment passes, and each breach is named with its remedy."""

import dataclasses
import importlib
import mmap
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fakes.gym_envs import SIZE, Reach, scene_image
from PIL import Image

from vlarl.cli import main
from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import StepOutcome, SuiteSpec, TaskSpec, started
from vlarl.envs.check import Finding, SlotEnv, Subject, check_env
from vlarl.envs.gym.env import GymEnv
from vlarl.envs.gym.vector import GymVectorPool
from vlarl.errors import UsageError
from vlarl.types import ChunkOutcome, Observation, Task

SPEC = SuiteSpec(
    "mine", (TaskSpec(0, "reach the goal", 30),), (0, 1, 2, 3), (4, 5), (4, 5), action_dim=2, proprio_dim=4
)
SHAPE = (1, SIZE, SIZE, 3)


class Right:
    """A SingleEnv that keeps every promise. Subclasses break one each."""

    def reset(self, task: Task) -> None:
        self.rng = np.random.default_rng(task.init_state)
        self.position, self.goal = self.rng.uniform(0, 0.4, 2), self.rng.uniform(0.5, 1.0, 2)

    def step(self, action: np.ndarray) -> StepOutcome:
        self.position = np.clip(self.position + 0.05 * np.clip(action, -1, 1), 0, 1)
        reached = bool(np.abs(self.position - self.goal).max() < 0.05)
        return StepOutcome(float(reached), reached, False, reached)

    def observe(self) -> Observation:
        proprio = np.concatenate([self.position, self.goal]).astype(np.float32)
        return Observation(scene_image(self.position, self.goal)[None], proprio, "reach the goal")

    def frame(self) -> np.ndarray:
        return scene_image(self.position, self.goal)

    def close(self) -> None:
        pass


class WrongObservation(Right):
    """Returns a wrong observation."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def observe(self) -> Observation:
        seen = super().observe()
        return replace(seen, **{name: change(getattr(seen, name)) for name, change in self.changes.items()})


class WrongStep(Right):
    """Returns a wrong outcome of a step."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def step(self, action: np.ndarray) -> StepOutcome:
        return replace(super().step(action), **self.changes)


class Overwrites(Right):
    buffer = np.zeros(SHAPE, np.uint8)

    def observe(self) -> Observation:
        self.buffer[0] = scene_image(self.position, self.goal)
        return replace(super().observe(), images=self.buffer)


class ChangesActions(Right):
    def step(self, action: np.ndarray) -> StepOutcome:
        action[-1] = np.sign(action[-1])
        return super().step(action)


class Drifts(Right):
    """Carries something over from one episode to the next."""

    drift = 0.0

    def step(self, action: np.ndarray) -> StepOutcome:
        self.drift += 1e-3
        self.position += self.drift
        return super().step(action)


class DriftsBetweenStates(Right):
    """Keeps what another state left behind."""

    states: frozenset[int] = frozenset()

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.states |= {task.init_state}
        self.position += 0.01 * len(self.states)


class NeverRestartsCount(Right):
    """Truncates every episode after the first."""

    over = False

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.num_steps = 0

    def step(self, action: np.ndarray) -> StepOutcome:
        self.num_steps += 1
        self.over = self.over or self.num_steps == 28
        return replace(super().step(action), truncated=self.over)


class BySeed(Right):
    def reset(self, task: Task) -> None:
        super().reset(replace(task, init_state=task.init_state + 100 * task.seed))


class OneState(Right):
    def reset(self, task: Task) -> None:
        super().reset(replace(task, init_state=0))


class Explodes(Right):
    def step(self, action: np.ndarray) -> StepOutcome:
        if np.abs(action).max() > 1:
            self.position = self.position * np.inf
            return StepOutcome(0.0, False, False, False)
        return super().step(action)


class Leaks(Right):
    def __init__(self) -> None:
        self.waste: list[mmap.mmap] = []

    def reset(self, task: Task) -> None:
        pages = mmap.mmap(-1, 4_000_000)  # new pages, however much free memory earlier tests have left to malloc
        pages.write(b"1" * len(pages))
        self.waste.append(pages)
        super().reset(task)


class Breaks(Right):
    def __init__(self, method: str) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("no gear")

        setattr(self, method, broken)


def found(env: Any, spec: SuiteSpec = SPEC, shape: tuple[int, int, int, int] = SHAPE, **more: Any) -> list[Finding]:
    return list(check_env(Subject(env, spec, shape, **more)))


def breaches(env: Any, **more: Any) -> list[str]:
    broken = [finding for finding in found(env, **more) if finding.kind == "breach"]
    assert all(finding.remedy for finding in broken)
    return [finding.text for finding in broken]


def test_a_right_environment_passes_everything():
    findings = found(Right(), twin=Right())
    assert [finding for finding in findings if finding.kind == "breach"] == []
    passed = [finding.text.partition(":")[0] for finding in findings if finding.kind == "passed"]
    assert passed == [
        "suite", "images", "proprio", "images", "proprio", "instruction", "steps", "steps", "kept", "replay", "replay",
        "states", "ending", "memory",
    ]  # fmt: skip
    notes = [finding.text.partition(":")[0] for finding in findings if finding.kind == "note"]
    assert notes == ["images", "success", "speed"]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (WrongObservation(images=lambda a: a.astype(np.float32)), "first look: images are float32[1, 20, 20, 3], not uint8[1, 20, 20, 3] as promised"),
        (WrongObservation(images=lambda a: a[0]), "first look: images are uint8[20, 20, 3], not uint8[1, 20, 20, 3] as promised"),
        (WrongObservation(proprio=lambda a: a[:3]), "first look: proprio are float32[3], not float32[4] as promised"),
        (WrongObservation(proprio=list), "first look: proprio are list, not float32[4] as promised"),
        (WrongObservation(images=lambda a: a * 0 + 90), "images: view 0 is of one colour"),
        (WrongObservation(images=lambda a: (a > 60).astype(np.uint8)), "images: view 0 holds nothing but 0 and 1"),
        (WrongObservation(proprio=lambda a: a * [1, np.nan, 1, np.inf]), "first look: proprio are float64[4], not float32[4] as promised"),
        (WrongObservation(proprio=lambda a: a * np.array([1, np.nan, 1, np.inf], np.float32)), "proprio: dimensions [1, 3] are not finite"),
        (WrongObservation(instruction=lambda _: " "), "instruction: is ' '"),
        (WrongStep(reward=float("nan")), "steps: step 1 returned the reward nan"),
        (WrongStep(success=1), "steps: step 1 returned success = 1"),
        (WrongStep(terminated=True, truncated=True), "steps: step 1 is terminated and truncated at once"),
        (WrongStep(success=True, terminated=False), "steps: step 1 succeeded without ending"),
        (ChangesActions(), "steps: step() changed the action it was given"),
        (Explodes(), "steps: actions beyond [-1, 1] make proprio infinite"),
        (Overwrites(), "kept: later steps write into the images of an earlier observation"),
        (DriftsBetweenStates(), "replay: after an episode of another state it is not the same: proprio differs after 0 steps, by up to 0.01"),
        (OneState(), "states: initial states 0 and 1 give the same observation"),
        (BySeed(), "states: the same state begins differently with another seed: proprio differs after 0 steps, by up to "),
        (NeverRestartsCount(), "ending: the episode after a reset is truncated in its first step"),
        (Leaks(), "memory: each reset takes 4."),
        (Breaks("reset"), "first look: raised ZeroDivisionError: no gear (test_env_check.py, line "),
        (Breaks("frame"), "images: raised ZeroDivisionError: no gear (test_env_check.py, line "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_each_breach_is_named(env, text):
    named = breaches(env)
    assert [name for name in named if name.startswith(text)] != [], named
    if not text.startswith(("steps: step 1 returned", "steps: step 1 is", "images: raised", "replay")):
        assert len(named) == 1, "and nothing else is blamed"


def test_what_is_carried_over_is_seen_in_a_replay():
    (named,) = [
        name for name in breaches(Drifts()) if name.startswith("replay: the same task and actions gave another")
    ]
    assert "proprio differs after 6 steps, by up to" in named


def test_images_and_rewards_are_compared_too():
    noisy = WrongObservation(images=lambda a: a ^ np.random.default_rng().integers(0, 2, a.shape, dtype=np.uint8))
    assert any("of the pixels differ after 0 steps, by up to 1 of 255" in name for name in breaches(noisy))

    class RandomRewards(Right):
        def step(self, action):
            return replace(super().step(action), reward=float(np.random.default_rng().normal()))

    assert any(
        name.startswith("replay: the same task and actions gave another episode: the rewards differ after 6 steps")
        for name in breaches(RandomRewards())
    )


def test_an_environment_that_differs_in_another_process():
    class Shifted(Right):
        def reset(self, task):
            super().reset(task)
            self.position += 0.25

    assert breaches(Right(), twin=Shifted()) == [
        "replay: in another process or slot it is not the same: proprio differs after 0 steps, by up to 0.25"
    ]


def test_views_that_show_the_same():
    twice = WrongObservation(images=lambda a: np.concatenate([a, a]))
    assert breaches(twice, shape=(2, SIZE, SIZE, 3)) == ["images: views 0 and 1 are the same"]


def test_a_suite_that_is_wrong():
    broken = dataclasses.replace(SPEC, tasks=(TaskSpec(1, "", 30),), eval_states=(3, 4))
    assert breaches(Right(), spec=broken)[:3] == [
        "suite: task ids don't count from 0",
        "suite: states [3] are for training and evaluation",
        "suite: task 1 has no instruction",
    ]
    empty = dataclasses.replace(SPEC, eval_states=())
    assert breaches(Right(), spec=empty) == ["suite: no initial states to train or to evaluate on"]


def test_what_can_not_be_started_is_not_checked_further():
    last = found(Breaks("observe"))[-1]
    assert (last.kind, last.text) == ("note", "the rest can't be checked before that is fixed")


def test_an_own_time_limit_is_noted():
    config = GymConfig(images=("pixels.front",), proprio=("state", "goal"), instructions=("reach the goal",))
    texts = [f.text for f in found(GymEnv(Reach(fault="own limit"), config, SIZE, "sparse")) if f.kind == "note"]
    assert "ending: it stops by itself after 5 steps, before the limit of 30 (env.max_steps)" in texts


class Walker:
    """An expert for `Right`."""

    def __init__(self, env: Right, can: bool = True) -> None:
        self.env, self.can = env, can

    def reset(self) -> None:
        if not self.can:
            raise UsageError("drawers are beyond it")

    def act(self) -> np.ndarray:
        return ((self.env.goal - self.env.position) * 20).astype(np.float32)


def test_an_expert_reaches_success():
    env = Right()
    texts = {f.text for f in found(env, expert=Walker(env))}
    assert any(text.startswith("success: the expert reached it in ") for text in texts)
    texts = {f.text for f in found(env, expert=Walker(env, can=False))}
    assert "success: the expert can't play this task: drawers are beyond it" in texts
    blind = WrongStep(success=False, terminated=False)
    assert "success: the expert did not reach it within 30 steps" in {
        f.text for f in found(blind, expert=Walker(blind))
    }


def test_slots_of_a_pool_are_checked_as_environments():
    config = GymConfig(
        env="fakes.gym_batches:TensorReach",
        images=("pixels.front",),
        proprio=("state", "goal"),
        instructions=("go to the goal",),
        batched=True,
    )
    pool = GymVectorPool(config, EnvConfig(max_steps=30), 2, SIZE, "dense")
    assert breaches(SlotEnv(pool, 0), spec=pool.spec, twin=SlotEnv(pool, 1)) == []

    def fails(*_: object) -> list[ChunkOutcome]:
        return [started(SlotEnv.observe(slot), error="the simulator died")]

    slot = SlotEnv(pool, 0)
    slot.reset(Task("gym", 0, 0, 0))
    pool.step_chunk = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the simulator died"):
        slot.step(np.zeros(2, np.float32))


# the command


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The command sets environment variables, as its process ends with it."""
    with patch.dict(os.environ):
        yield


REACH = [
    "--env.suite",
    "gym",
    "--gym.env",
    "fakes.gym_envs:Reach",
    "--gym.images",
    "pixels.front",
    "--gym.proprio",
    "state",
    "goal",
    "--env.max_steps",
    "20",
    "--env.image_size",
    "20",
]
GOAL = ["--gym.instructions", "go to the goal"]


def test_breaches_are_an_exit_code_and_have_remedies(capsys):
    assert main(["env", "check", *REACH, *GOAL, "--gym.kwargs", "{fault: one state}"]) == 1
    out = capsys.readouterr().out
    assert (
        "  BREACH  states: initial states 0 and 1 give the same observation\n"
        "          → task.init_state must choose the state; in Gymnasium, reset(seed) must choose it\n"
    ) in out
    assert out.endswith("1 breach, 13 checks passed\n")


def test_what_cant_be_checked_is_refused(capsys):
    assert main(["env", "check", *REACH, *GOAL, "--gym.success", "info.won"]) == 2
    assert capsys.readouterr().err == "error: gym.success = 'info.won': info has no 'won'; it has success\n"
    assert main(["env", "check", "a.yaml", "b.yaml"]) == 2
    assert "one suite, preset or file is enough; got a.yaml, b.yaml" in capsys.readouterr().err


def test_suites_and_tasks_are_listed(capsys):
    assert main(["env", "list"]) == 0
    out = capsys.readouterr().out
    assert "libero_spatial          10    220  pip install -c constraints.txt -e '.[libero]'\n" in out
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert "pip install -c constraints.txt -e '.[libero" in readme, "what the list says is what README says"
    assert "tabletop_long           10     64  built in\n" in out
    assert main(["env", "tasks", "tabletop_goal"]) == 0
    assert capsys.readouterr().out.splitlines()[3] == "  3  turn on the stove"
    assert main(["env", "tasks", "gym"]) == 2
    assert "gym.instructions" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "suite"), [("tabletop_goal", "tabletop_goal"), ("tabletop", "tabletop_spatial")])
def test_a_suite_is_checked_by_its_name_with_the_images_that_the_policy_reads(capsys, name, suite):
    assert main(["env", "check", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{suite}, task 0: ")
    assert "images: uint8[1, 56, 56, 3]" in out
    assert "success: the expert reached it in" in out


def test_one_suite_is_enough(capsys):
    assert main(["env", "check", "tabletop_goal", "--env.suite", "tabletop_long"]) == 2
    assert "one suite is enough; got tabletop_goal and --env.suite tabletop_long" in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    for arguments in (["env"], ["env", "--help"]):
        assert main(arguments) == 0
        assert "vlarl env check [SUITE|PRESET|FILE]" in capsys.readouterr().out
    assert main(["env", "chek"]) == 2
    assert "did you mean 'check'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["env", "check", "--help"])
    assert left.value.code == 0 and "--out DIR" in capsys.readouterr().out


def test_the_example_of_the_docs_runs_as_it_says(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[3] / "docs" / "adding-an-env.md").read_text()
    opened = ("```python\n(.*?)```", "```bash\n(.*?)```", "```\n(gym, task 0.*?)```")
    code, command, printed = (re.search(block, text, re.DOTALL)[1] for block in opened)
    (tmp_path / "reach_env.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program, *arguments = shlex.split(command)
    assert program == "vlarl" and main(arguments) == 0

    def without_times(lines: str) -> list[str]:
        return [line for line in lines.splitlines() if "speed: " not in line]

    assert without_times(capsys.readouterr().out) == without_times(printed)
    env = importlib.import_module("reach_env").ReachDot()
    shown = env.reset(seed=0)[0]["camera"]
    for name in ("view_0.png", "frame.png"):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "images" / name)), shown)
