"""Checks of episodes: steps, replay, initial states, endings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlarl.config.words import counted
from vlarl.envs.base import SingleEnv, StepOutcome
from vlarl.envs.check.findings import Finding, Findings, Subject, breach, note, passed
from vlarl.errors import UsageError
from vlarl.types import FloatArray, Prompt, Task, UInt8Array

NUM_STEPS = 24  # of an episode that is played twice
LOOK_EVERY = 6  # steps between its observations
NUM_STATES = 4  # initial states that are compared


def steps(subject: Subject) -> Findings:
    """What each step must return, over an episode's first steps."""
    env = subject.env
    env.reset(subject.task())
    wrong: dict[str, Finding] = {}
    for number, action in enumerate(subject.actions(NUM_STEPS), start=1):
        given = action.copy()
        step = env.step(given)
        for finding in _step_breaches(step, number):
            wrong.setdefault(finding.remedy, finding)
        if not np.array_equal(given, action):
            remedy = "copy it first: the policy is trained on the action that it gave"
            wrong.setdefault(remedy, breach("steps: step() changed the action it was given", remedy))
        if step.terminated or step.truncated:
            env.reset(subject.task())
    yield from wrong.values() or [passed(f"steps: {NUM_STEPS} of random actions with finite rewards")]
    env.reset(subject.task())
    was_finite = np.isfinite(env.observe().proprio).all()
    _run(env, subject.actions(3) * 5.0)
    if was_finite and not np.isfinite(env.observe().proprio).all():
        yield breach("steps: actions beyond [-1, 1] make proprio infinite", "clip them")
    else:
        yield passed("steps: actions beyond [-1, 1] do no harm")


def _step_breaches(step: StepOutcome, number: int) -> Findings:
    after = f"steps: step {number}"
    if not np.isfinite(step.reward):
        yield breach(f"{after} returned the reward {step.reward}", "return a finite reward")
    for name in ("terminated", "truncated", "success"):
        if not isinstance(getattr(step, name), bool | np.bool_):
            yield breach(f"{after} returned {name} = {getattr(step, name)!r}", "return True or False")
    if step.terminated and step.truncated:
        remedy = "terminated when the task is over, truncated when time is: PPO bootstraps from the latter"
        yield breach(f"{after} is terminated and truncated at once", remedy)
    if step.success and not step.terminated:
        yield breach(
            f"{after} succeeded without ending", "terminate at success, or every further step is rewarded again"
        )


def _run(env: SingleEnv, actions: FloatArray) -> list[StepOutcome]:
    """Step until the episode or the actions end."""
    taken: list[StepOutcome] = []
    for action in actions:
        taken.append(env.step(action))
        if taken[-1].terminated or taken[-1].truncated:
            break
    return taken


def kept(subject: Subject) -> Findings:
    """An observation that was handed out does not change afterwards."""
    env = subject.env
    env.reset(subject.task())
    first = env.observe()
    images, proprio = first.images.copy(), first.proprio.copy()
    _run(env, subject.actions(4))
    later = env.observe()
    reused = {
        "images": np.shares_memory(first.images, later.images) or not _same(first.images, images),
        "proprio": np.shares_memory(first.proprio, later.proprio) or not _same(first.proprio, proprio),
    }
    if any(reused.values()):
        names = " and ".join(name for name, is_reused in reused.items() if is_reused)
        remedy = "hand out copies: the policy is trained on an episode after it has ended"
        yield breach(f"kept: later steps write into the {names} of an earlier observation", remedy)
    else:
        yield passed("kept: later steps leave earlier observations alone")


class _Snapshot(NamedTuple):
    num_steps: int
    images: UInt8Array
    proprio: FloatArray
    total_reward: float  # so far
    prompt: Prompt | None


def _play(env: SingleEnv, task: Task, actions: FloatArray) -> list[_Snapshot]:
    """Observations and total reward of an episode, at some of its steps and at its end."""

    def look(num_steps: int) -> _Snapshot:
        seen = env.observe()
        return _Snapshot(num_steps, seen.images.copy(), seen.proprio.copy(), total_reward, seen.prompt)

    env.reset(task)
    total_reward = 0.0
    snapshots = [look(0)]
    for number, action in enumerate(actions, start=1):
        step = env.step(action)
        total_reward += float(np.float32(step.reward))  # as pools return it
        ended = step.terminated or step.truncated
        if number % LOOK_EVERY == 0 or ended:
            snapshots.append(look(number))
        if ended:
            break
    return snapshots


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _same_prompt(a: Prompt | None, b: Prompt | None) -> bool:
    if a is None or b is None:
        return a is b
    pixels = (*a.images, *a.videos), (*b.images, *b.videos)
    return a.messages == b.messages and len(pixels[0]) == len(pixels[1]) and all(map(_same, *pixels))


def _difference(ours: Sequence[_Snapshot], theirs: Sequence[_Snapshot]) -> str | None:
    """The first difference between two episodes, in words."""
    for a, b in zip(ours, theirs, strict=False):
        after = f"after {counted(a.num_steps, 'step')}"
        if a.num_steps != b.num_steps:
            return f"one ended after {counted(min(a.num_steps, b.num_steps), 'step')}, the other did not"
        if not _same(a.proprio, b.proprio):
            with np.errstate(invalid="ignore"):
                distance = np.nanmax(np.abs(a.proprio - b.proprio))
            return f"proprio differs {after}, by up to {distance:g}"
        if not _same(a.images, b.images):
            distances = np.abs(a.images.astype(np.int16) - b.images)
            fraction = (distances.max(axis=-1) > 0).mean()
            return f"{fraction:.1%} of the pixels differ {after}, by up to {distances.max()} of 255"
        if not _same_prompt(a.prompt, b.prompt):
            return f"the prompts differ {after}"
        if not _same(np.array(a.total_reward), np.array(b.total_reward)):
            return f"the rewards differ {after}: {a.total_reward:g} and {b.total_reward:g} in all"
    return None


def replay(subject: Subject) -> Findings:
    """The same task and actions give the same episode: again, after another one, and in another process or slot."""
    env, task, limit = subject.env, subject.task(), subject.spec.tasks[0].max_steps
    actions = subject.actions(min(NUM_STEPS, limit - 1))  # pools apply the limit, environments need not
    first = _play(env, task, actions)
    remedy = "the task must determine everything random: seed all generators in reset(), carry nothing over"
    if difference := _difference(first, _play(env, task, actions)):
        yield breach(f"replay: the same task and actions gave another episode: {difference}", remedy)
        return
    _play(env, subject.task(1), subject.actions(LOOK_EVERY + 1, seed=1))
    if difference := _difference(first, _play(env, task, actions)):
        yield breach(f"replay: after an episode of another state it is not the same: {difference}", remedy)
        return
    yield passed(f"replay: the same {counted(first[-1].num_steps, 'step')} again, also after another episode")
    if subject.twin is None:
        return
    if difference := _difference(first, _play(subject.twin, task, actions)):
        yield breach(f"replay: in another process or slot it is not the same: {difference}", remedy)
    else:
        yield passed("replay: the same in another process or slot")


def states(subject: Subject) -> Findings:
    """The task alone determines the initial state: another index gives another state, the same index the same."""

    def first(state: int, seed: int = 1) -> list[_Snapshot]:
        return _play(subject.env, subject.task(state, seed), subject.actions(0))

    count = min(NUM_STATES, len(subject.spec.train_states))
    starts = [first(state) for state in range(count)]
    alike = [pair for pair in combinations(range(count), 2) if _difference(starts[pair[0]], starts[pair[1]]) is None]
    if alike:
        remedy = "task.init_state must choose the state; in Gymnasium, reset(seed) must choose it"
        yield breach(f"states: initial states {alike[0][0]} and {alike[0][1]} give the same observation", remedy)
    else:
        yield passed(f"states: {count} initial states, all different")
    if difference := _difference(starts[0], first(0, seed=2)):
        remedy = "a group's episodes start alike: task.init_state must determine the state, not task.seed"
        yield breach(f"states: the same state begins differently with another seed: {difference}", remedy)


def ending(subject: Subject) -> Findings:
    """An episode up to the time limit, and a new one after it."""
    env, limit = subject.env, subject.spec.tasks[0].max_steps
    env.reset(subject.task())
    taken = _run(env, subject.actions(limit))
    if taken[-1].truncated and len(taken) < limit:
        stops = f"it stops by itself after {counted(len(taken), 'step')}"
        yield note(f"ending: {stops}, before the limit of {limit} (env.max_steps)")
    env.reset(subject.task())
    if env.step(subject.actions(1)[0]).truncated:
        remedy = "count the steps of each episode from its reset()"
        yield breach("ending: the episode after a reset is truncated in its first step", remedy)
    else:
        yield passed(f"ending: {counted(len(taken), 'step')}, and a new episode after them")


def success(subject: Subject) -> Findings:
    """Whether success is reported to an expert, if there is one."""
    if subject.expert is None:
        yield note("success: there is no expert to reach it; play an episode yourself to see that it is reported")
        return
    subject.env.reset(subject.task())
    try:
        subject.expert.reset()
    except UsageError as error:
        yield note(f"success: the expert can't play this task: {error}")
        return
    for num_steps in range(1, subject.spec.tasks[0].max_steps + 1):
        if subject.env.step(subject.expert.act()).success:
            yield passed(f"success: the expert reached it in {counted(num_steps, 'step')}")
            return
    yield note(f"success: the expert did not reach it within {subject.spec.tasks[0].max_steps} steps")
