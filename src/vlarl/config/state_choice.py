"""Which initial states an evaluation uses, and the warnings about them that accompany its success rate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from vlarl.config.known import PROMPTS
from vlarl.config.suites import StateProtocol, SuiteStates
from vlarl.config.training_data import FILE_NAME, TrainingData
from vlarl.config.words import ROBOT_WORDS, counted, plural, words_of

DEFAULT_EPISODES = 20  # per task, if there are that many initial states


def by_preference(states: SuiteStates, protocol: StateProtocol) -> tuple[int, ...]:
    """A protocol's states in order of preference, for evaluations that don't name the protocol.

    The held-out ones come first, then the others from the end of the list: most runs train on the first ones.
    """
    candidates = states.evaluated(protocol)
    held_out = [state for state in candidates if state in states.eval]
    return (*held_out, *(state for state in reversed(candidates) if state not in states.eval))


def choose_states(
    states: SuiteStates,
    protocol: StateProtocol,
    trained: Collection[int],
    count: int | None,
    as_published: bool,
) -> tuple[int, ...]:
    """The initial states of each task to evaluate on, in ascending order; fewer than `count` if there are no more.

    `count` None is DEFAULT_EPISODES. With `as_published` they are the protocol's first ones, as in published results
    and in the training loop's own evaluation, whether or not they were trained on. Without it, states that were
    `trained` on are left out.

    LIBERO after a run that trained on 0 to 29, protocol benchmark: 0 to 19 as published, else 30 to 49.
    """
    ordered = states.evaluated(protocol) if as_published else by_preference(states, protocol)
    usable = [state for state in ordered if as_published or state not in trained]
    return tuple(sorted(usable[: DEFAULT_EPISODES if count is None else count]))


def missing_states(wanted: int, suite: str, protocol: StateProtocol, num_eval: int, num_benchmark: int) -> str | None:
    """The message if more episodes per task are requested than the protocol has initial states; None: enough.

    `num_eval` and `num_benchmark` say how many states a task has under the two protocols.
    """
    available = num_eval if protocol == "disjoint" else num_benchmark
    if wanted <= available:
        return None
    other = f", or use protocol benchmark, which has {num_benchmark}" if num_benchmark > available else ""
    return (
        f"a task of {suite} has {counted(available, 'initial state')} for evaluation under protocol {protocol}; "
        f"use {available} or fewer{other}"
    )


@dataclass(frozen=True)
class UsedStates:
    """The initial states that training has used, of those that an evaluation could use."""

    states: frozenset[int]  # in at least one of the tasks
    task_ids: tuple[int, ...]  # the evaluated tasks that they belong to
    free_task_ids: tuple[int, ...]  # tasks of the suite that training has not used at all
    by: tuple[str, ...] = ()  # which checkpoints' training, if there are several


def too_few_unseen(wanted: int | None, used: UsedStates, total: int, suite: str, protocol: StateProtocol) -> str | None:
    """The message if too few initial states are left that were not trained on; None: there are enough."""
    unseen = total - len(used.states)
    if unseen >= (1 if wanted is None else wanted):
        return None
    tasks = f"{plural(len(used.task_ids), 'task')} {in_ranges(used.task_ids)}"
    remedies = [f"use {unseen} or fewer"] if unseen else []
    if used.free_task_ids:
        remedies.append(
            f"choose tasks that were not trained on with --tasks (of {suite}: {in_ranges(used.free_task_ids)})"
        )
    remedies.append(f"name the protocol (--protocol {protocol}) to include states that were trained on")
    of = f" of {' and of '.join(used.by)}" if used.by else ""
    return (
        f"training{of} has used {len(used.states)} of the {total} initial states that a task of {suite} has under "
        f"protocol {protocol}, in {tasks}; {', or '.join(remedies)}"
    )


def state_warnings(
    training: TrainingData | None,
    suite: str,
    gym_env: str | None,
    episodes: Collection[tuple[int, int]],
    who: str = "this checkpoint",
    held_out: bool = False,
) -> tuple[str, ...]:
    """The warnings that accompany the success rate on these (task, initial state) pairs.

    `held_out`: the evaluation is that of a run on prompts, which holds its rows out of its own training.
    """
    words = words_of(suite)
    states = plural(2, words.state)
    if training is None:
        return (
            f"{who} does not say which {states} it was trained on (it has no valid {FILE_NAME}): it may have been "
            f"trained on those of this evaluation, and the {words.rate} may be too high.",
        )
    warnings = []
    if seen := _num_seen(training, suite, gym_env, episodes):
        of, on = counted(len(episodes), words.episode), "states" if words is ROBOT_WORDS else states
        begin = ("begins from", "begin from") if words is ROBOT_WORDS else ("is to", "are to")
        warnings.append(
            f"{seen} of {of} {begin[seen > 1]} {states} that {who} was trained on: the {words.rate} says "
            f"little about {on} that it has never seen."
        )
    tasks = {task_id for task_id, _ in episodes}
    runs = [run for task_id in tasks for run in training.on(suite, gym_env, task_id)]
    if any(run.suite == PROMPTS for run in runs) and not held_out:
        warnings.append(
            f"{who} was trained on rows of data (prompts.path) that are not listed with it: make sure that those of "
            "this evaluation are not among them."
        )
    if vague := sorted({run.suite for run in runs if run.states is None and run.suite != PROMPTS}):
        warnings.append(
            f"{who} was trained on demonstrations of {', '.join(vague)} whose initial states are not known: they may "
            "be those of this evaluation."
        )
    if training.unknown:
        warnings.append(
            f"{who} comes from {', '.join(training.unknown)}, and it is not known which {states} that was trained on"
            f"{' or recorded from' if words is ROBOT_WORDS else ''}: they may be those of this evaluation."
        )
    return tuple(warnings)


@dataclass(frozen=True)
class SeenStates:
    """Whether a run was trained on the initial states of its own evaluation, as far as that is known."""

    num_seen: int
    num_episodes: int
    warnings: tuple[str, ...]

    @property
    def kind(self) -> Literal["unseen", "trained", "partly trained", "not known"]:
        """`unseen` only if nothing is left unknown."""
        if self.num_seen:
            return "trained" if self.num_seen == self.num_episodes else "partly trained"
        return "not known" if self.warnings else "unseen"


def seen_by_run(
    training: TrainingData | None,
    gym_env: str | None,
    protocol: str | None,
    episodes: Mapping[str, Collection[tuple[int, int]]],
) -> SeenStates:
    """For the report and the last lines of `vlarl train`; `training` comes from the run's newest checkpoint.

    `episodes` are the (task, initial state) pairs of each suite.
    """
    parts = [_seen_of_suite(training, suite, gym_env, protocol, own) for suite, own in episodes.items()]
    warnings = dict.fromkeys(warning for part in parts for warning in part.warnings)
    return SeenStates(sum(p.num_seen for p in parts), sum(p.num_episodes for p in parts), tuple(warnings))


def _seen_of_suite(
    training: TrainingData | None,
    suite: str,
    gym_env: str | None,
    protocol: str | None,
    episodes: Collection[tuple[int, int]],
) -> SeenStates:
    held_out = suite == PROMPTS and protocol != "benchmark"
    warnings = state_warnings(training, suite, gym_env, episodes, "this run's policy", held_out)
    if protocol == "benchmark":  # such a run trains on the states that it is evaluated on
        return SeenStates(len(episodes), len(episodes), warnings)
    return SeenStates(0 if training is None else _num_seen(training, suite, gym_env, episodes), len(episodes), warnings)


def _num_seen(training: TrainingData, suite: str, gym_env: str | None, episodes: Collection[tuple[int, int]]) -> int:
    return sum(state in training.states(suite, gym_env, task_id) for task_id, state in episodes)


def in_ranges(states: Iterable[int]) -> str:
    """`0 to 3, 7` for 0, 1, 2, 3 and 7."""
    ranges: list[list[int]] = []
    for state in sorted(set(states)):
        if ranges and state == ranges[-1][-1] + 1:
            ranges[-1].append(state)
        else:
            ranges.append([state])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in ranges)
