"""Which initial states an evaluation uses, and what has to be said about them beside its number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vlarl.config.suites import StateProtocol, SuiteStates
from vlarl.config.training_data import FILE_NAME, TrainingData

DEFAULT_EPISODES = 20  # a task, where so many initial states exist


def by_preference(states: SuiteStates, protocol: StateProtocol, trained: Collection[int]) -> tuple[int, ...]:
    """A protocol's states, the best to evaluate on first.

    States that were not trained on come before all others. Among these the held-out ones come first, then the others
    from the end of the list: where it is not known what was trained on, runs mostly take the first ones.
    """
    candidates = states.evaluated(protocol)
    held_out = [state for state in candidates if state in states.eval]
    ordered = [*held_out, *(state for state in reversed(candidates) if state not in states.eval)]
    return tuple(sorted(ordered, key=lambda state: state in trained))  # the order of equals is kept


def choose_states(
    states: SuiteStates,
    protocol: StateProtocol,
    trained: Collection[int],
    count: int | None,
    may_be_trained_on: bool,
) -> tuple[int, ...]:
    """The initial states of each task to evaluate on, in ascending order; fewer than `count` where there are not more.

    `count` is DEFAULT_EPISODES where it is None. Of states that were `trained` on none is taken, unless
    `may_be_trained_on` says so and the others are too few.

    LIBERO after a run that trained on 0 to 29: 30 to 49 by default; of 50 that protocol benchmark was asked for, all.
    """
    ordered = by_preference(states, protocol, trained)
    usable = [state for state in ordered if may_be_trained_on or state not in trained]
    return tuple(sorted(usable[: DEFAULT_EPISODES if count is None else count]))


def missing_states(wanted: int, suite: str, protocol: StateProtocol, num_eval: int, num_benchmark: int) -> str | None:
    """What to say where more episodes a task are wanted than the protocol has initial states; None: there are enough.

    `num_eval` and `num_benchmark` are what a task of the suite has under the two protocols.
    """
    available = num_eval if protocol == "disjoint" else num_benchmark
    if wanted <= available:
        return None
    other = f", or take protocol benchmark, which has {num_benchmark}" if num_benchmark > available else ""
    return (
        f"a task of {suite} has {available} initial states for evaluation under protocol {protocol}; "
        f"ask for {available} or fewer{other}"
    )


def too_few_unseen(wanted: int | None, unseen: int, total: int, suite: str, protocol: StateProtocol) -> str | None:
    """What to say where too few initial states are left that were not trained on; None: there are enough."""
    if unseen >= (1 if wanted is None else wanted):
        return None
    fewer = f"ask for {unseen} or fewer, or " if unseen else ""
    return (
        f"training has used {total - unseen} of the {total} initial states that a task of {suite} has under protocol "
        f"{protocol}; {fewer}name the protocol (--protocol {protocol}) to evaluate on states that were trained on, too"
    )


def state_warnings(
    training: TrainingData | None, suite: str, gym_env: str | None, episodes: Sequence[tuple[int, int]]
) -> tuple[str, ...]:
    """What has to be said beside the number of an evaluation on these (task, initial state) pairs."""
    if training is None:
        return (
            f"this checkpoint does not say which initial states it was trained on (it has no {FILE_NAME}): it may have "
            "been trained on those of this evaluation, and the success rate may be too high.",
        )
    warnings = []
    if seen := sum(state in training.states(suite, gym_env, task_id) for task_id, state in episodes):
        warnings.append(
            f"{seen} of {len(episodes)} episodes begin from initial states that this checkpoint was trained on: the "
            "success rate says little about states that it has never seen."
        )
    tasks = {task_id for task_id, _ in episodes}
    runs = [run for task_id in tasks for run in training.on(suite, gym_env, task_id)]
    if vague := sorted({run.suite for run in runs if run.states is None}):
        warnings.append(
            f"this checkpoint was trained on demonstrations of {', '.join(vague)} whose initial states are not known: "
            "they may be those of this evaluation."
        )
    if training.unknown:
        warnings.append(
            f"this checkpoint comes from {', '.join(training.unknown)}, and it is not known which initial states that "
            "was trained on or recorded from: they may be those of this evaluation."
        )
    return tuple(warnings)


def in_ranges(states: Iterable[int]) -> str:
    """`0 to 3, 7` for 0, 1, 2, 3 and 7."""
    ranges: list[list[int]] = []
    for state in sorted(set(states)):
        if ranges and state == ranges[-1][-1] + 1:
            ranges[-1].append(state)
        else:
            ranges.append([state])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}" for part in ranges)
