"""Facts about the configured suite, without its simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vlarl.config.known import GYM, PROMPTS, SUITES, SuiteFacts
from vlarl.config.schema import Camera, EnvConfig, GymConfig

StateProtocol = Literal["disjoint", "benchmark"]
BOTH = "both"  # protocols in one evaluation, which has the states of each

CAMERAS: tuple[Camera, ...] = ("agent", "wrist")  # in the order that policies read them


def suites_of(env: EnvConfig) -> tuple[str, ...]:
    """The suites of a run or an evaluation: one, or several of one kind."""
    return env.suites or (env.suite,)


def each_suite(env: EnvConfig) -> list[EnvConfig]:
    """The same options for each suite alone, with the tasks that are configured for it."""
    return [
        env.model_copy(
            update={
                "suite": suite,
                "suites": (),
                "task_ids": env.suite_tasks.get(suite, env.task_ids),
                "suite_tasks": {},
            }
        )
        for suite in suites_of(env)
    ]


def suite_label(env: EnvConfig) -> str:
    """The suites as one name: `libero_goal`, or `libero_goal+libero_object`."""
    return "+".join(suites_of(env))


def num_configured_tasks(env: EnvConfig, gym: GymConfig) -> int | None:
    """How many tasks there are in all suites; None for an unknown suite."""
    counts = [
        facts and (facts.num_tasks if one.task_ids is None else len(one.task_ids))
        for one in each_suite(env)
        for facts in [suite_facts(one, gym)]
    ]
    return None if None in counts else sum(count or 0 for count in counts)


def suite_facts(env: EnvConfig, gym: GymConfig) -> SuiteFacts | None:
    """Tasks, limits and states of the configured suite; None for an unknown suite.

    Several suites are of one kind and differ in their tasks and time limits: the facts are those of the first, with the
    longest limit.
    """
    if len(env.suites) > 1:
        found = [suite_facts(one, gym) for one in each_suite(env)]
        known = [facts for facts in found if facts is not None]
        limits = [facts.max_steps for facts in known if facts.max_steps is not None]
        return replace(known[0], max_steps=max(limits, default=None)) if len(known) == len(found) else None
    if env.suite == GYM:
        num_eval_states = num_gym_eval_states(gym)
        return SuiteFacts(
            num_tasks=max(1, len(gym.instructions)),
            max_steps=env.max_steps,
            num_train_states=gym.num_states - num_eval_states,
            num_eval_states=num_eval_states,
            num_benchmark_states=num_eval_states,
            in_processes=not gym.batched,
            has_dense_reward=True,
        )
    if env.suite == PROMPTS:
        return SuiteFacts(1, 1, 0, 0, 0, in_processes=False, are_states_known=False)
    facts = SUITES.get(env.suite)
    return facts if facts is None or env.max_steps is None else replace(facts, max_steps=env.max_steps)


@dataclass(frozen=True)
class SuiteStates:
    """Indices of the initial states of a task, as `SuiteSpec` has them."""

    train: tuple[int, ...]
    eval: tuple[int, ...]
    benchmark: tuple[int, ...]

    @classmethod
    def of(cls, facts: SuiteFacts) -> SuiteStates:
        """LIBERO: train 0 to 29, eval 30 to 49, benchmark 0 to 49."""
        states = tuple(range(facts.num_train_states + facts.num_eval_states))
        num_train = facts.num_train_states
        return cls(states[:num_train], states[num_train:], states[-facts.num_benchmark_states :])

    def trained(self, protocol: StateProtocol) -> tuple[int, ...]:
        """The states that a run with this protocol trains on."""
        return self.train if protocol == "disjoint" else self.benchmark

    def evaluated(self, protocol: StateProtocol) -> tuple[int, ...]:
        """The states that an evaluation with this protocol may use."""
        return self.eval if protocol == "disjoint" else self.benchmark


def cameras_of(env: EnvConfig, num_images: int | None = None) -> tuple[Camera, ...]:
    """The cameras that are rendered: as configured, or as many as a policy reads."""
    return env.cameras or CAMERAS[: num_images or 1]


def num_gym_eval_states(gym: GymConfig) -> int:
    """How many of a Gymnasium environment's states are for evaluation: two fifths, the last ones."""
    return gym.num_states - gym.num_states * 3 // 5
