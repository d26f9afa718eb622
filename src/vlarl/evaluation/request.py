"""The request for an evaluation: a checkpoint, and the sections env, gym and policy, first from its run, then as given.

Imports neither torch nor a simulator, so that errors in the options are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from vlarl.config.describe import options
from vlarl.config.known import GYM, PROMPTS, is_prompts
from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.rules.effects import without_effect
from vlarl.config.rules.env import check_gym, check_prompts, check_suite, check_task_ids
from vlarl.config.rules.sampling import check_texts
from vlarl.config.run_checkpoints import locate_checkpoint
from vlarl.config.schema import (
    Config,
    EnvConfig,
    GymConfig,
    PolicyConfig,
    PromptsConfig,
    RolloutConfig,
    Section,
    TextConfig,
)
from vlarl.config.source.yaml_file import read_document
from vlarl.config.state_choice import UsedStates, choose_states, missing_states, too_few_unseen
from vlarl.config.suites import SuiteStates, suite_facts
from vlarl.config.training_data import TrainingData, run_of, training_data_of
from vlarl.config.trust import refuse_untrusted
from vlarl.errors import UsageError
from vlarl.types import Task

Videos = int | Literal["all", "failures"]


class EvalOptions(Section):
    """The sections of a configuration that an evaluation reads."""

    env: EnvConfig = EnvConfig()
    gym: GymConfig = GymConfig()
    prompts: PromptsConfig = PromptsConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: TextConfig = TextConfig()


SECTIONS = tuple(EvalOptions.model_fields)

NOT_OF_A_RUN = ("task_ids", "num_envs", "cameras")  # what to evaluate; depends on this machine; set by the checkpoint
OF_ONE_SUITE = ("protocol", "max_steps")

_EPISODE_ID = re.compile(r"(?P<suite>.+)-t(?P<task>\d{2,})-s(?P<state>\d{3,})-(?P<seed>[0-9a-f]{16})")
_Model = TypeVar("_Model", bound=Section)


@dataclass(frozen=True)
class EvalRequest:
    """A checkpoint, and on which episodes and how it is evaluated."""

    checkpoint: str
    env: EnvConfig
    gym: GymConfig
    policy: PolicyConfig  # how it is loaded; its path is not read
    training: TrainingData | None  # what it was trained on; None: not known
    init_states: tuple[int, ...]  # of each task, to evaluate on
    states_per_task: int | None = None  # as requested; None: all, up to DEFAULT_EPISODES
    as_published: bool = False  # the protocol was requested: its first states, even if they were trained on
    temperature: float = 0.0
    seed: int = 0
    videos: Videos = 0
    device: str = "auto"
    replay: Task | None = None  # the one episode to run, which need not be one of the protocol's
    prompts: PromptsConfig = PromptsConfig()
    rollout: TextConfig = TextConfig()  # where texts end


def eval_request(
    checkpoint: str | Path,
    given: Mapping[str, object],
    *,
    training: TrainingData | None = None,
    states_per_task: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    videos: Videos = 0,
    device: str = "auto",
    episode: str | None = None,
    trust: bool = False,
) -> EvalRequest:
    """The request for a checkpoint or a run: the options of its run, overridden by those given as `{"env.suite": …}`.

    `training` is the training data of a checkpoint that is not on this machine yet; otherwise it is read here.
    `episode` is the id of one episode to run again, in its suite. `trust`: code that the run's configuration names may
    be run, even if another user wrote it.
    Raises ConfigError with every problem that can be found without a simulator.
    """
    checkpoint = locate_checkpoint(checkpoint).path
    training = training or training_data_of(checkpoint)
    folder = run_of(str(checkpoint))
    run = _sections_of_run(folder)
    requested = {section: _under(section, given) for section in SECTIONS}
    replay = None if episode is None else task_of(episode)
    if replay is not None:
        requested["env"]["suite"] = replay.suite
    run_suite = run["env"].get("suite")
    suite = requested["env"].get("suite") or run_suite or (training and training.suite) or EnvConfig().suite
    dropped = NOT_OF_A_RUN if suite == run_suite else (*NOT_OF_A_RUN, *OF_ONE_SUITE)
    kept = {name: value for name, value in run["env"].items() if name not in dropped}
    own_protocol = training.protocol(suite) if training is not None else None
    protocol = {"protocol": own_protocol or "benchmark"}
    env = _validated(EnvConfig, "env", {**protocol, **kept, **requested["env"], "suite": suite})
    if videos and is_prompts(suite):
        raise UsageError(
            f"videos: prompts ({suite}) have none, so leave it out; samples.jsonl of the results has the responses."
        )
    request = EvalRequest(
        checkpoint=str(checkpoint),
        env=env,
        gym=_validated(GymConfig, "gym", {**(run["gym"] if suite == GYM else {}), **requested["gym"]}),
        policy=_validated(PolicyConfig, "policy", {**run["policy"], **requested["policy"]}),
        training=training,
        init_states=() if replay is None else (replay.init_state,),
        states_per_task=states_per_task,
        # A run that was configured to train on the benchmark's states measures itself on them.
        as_published="protocol" in requested["env"] or own_protocol == "benchmark",
        temperature=temperature,
        seed=seed,
        videos=videos,
        device=device,
        replay=replay,
        prompts=_validated(
            PromptsConfig, "prompts", {**(run["prompts"] if suite == PROMPTS else {}), **requested["prompts"]}
        ),
        rollout=_validated(TextConfig, "rollout", {**_texts_of_run(run["rollout"], suite), **requested["rollout"]}),
    )
    rollout = RolloutConfig(**request.rollout.model_dump())
    unread = without_effect(Config(env=env, gym=request.gym, prompts=request.prompts, rollout=rollout), given)
    if problems := list(_problems(request)) or list(unread):
        raise ConfigError(problems)
    if folder is not None and not trust:
        used = {"env": request.env.model_dump(), "gym": request.gym.model_dump()}
        refuse_untrusted(folder / "config.yaml", used, given)
    return request if replay is not None else replace(request, init_states=_states(request, [request]))


def on_the_same_states(a: EvalRequest, b: EvalRequest) -> tuple[EvalRequest, EvalRequest]:
    """Two requests that differ in their checkpoint, on initial states that neither of them was trained on."""
    states = _states(a, [a, b])
    return replace(a, init_states=states), replace(b, init_states=states)


def same_episodes(request: EvalRequest) -> dict[str, object]:
    """The options that make a second request run the episodes of this one, whatever its own run would choose."""
    shared = {f"env.{name}": getattr(request.env, name) for name in ("suite", "protocol", "max_steps")}
    if request.env.suite == GYM:
        shared |= {f"gym.{name}": value for name, value in request.gym.model_dump().items()}
    if request.env.suite == PROMPTS:
        shared |= {f"prompts.{name}": value for name, value in request.prompts.model_dump().items()}
    if is_prompts(request.env.suite):
        shared |= {f"rollout.{name}": value for name, value in request.rollout.model_dump().items()}
    return shared


def task_of(episode_id: str) -> Task:
    """The task that `Task.episode_id` names."""
    match = _EPISODE_ID.fullmatch(episode_id)
    if match is None:
        example = Task("libero_spatial", 3, 17, 0x4D122750A6710509).episode_id
        raise UsageError(
            f"{episode_id!r} is not an episode id: take one from episodes.jsonl or results.json, such as {example}."
        )
    return Task(match["suite"], int(match["task"]), int(match["state"]), int(match["seed"], 16))


def _problems(request: EvalRequest) -> Iterator[Problem]:
    env, gym = request.env, request.gym
    yield from check_suite(env.suite, "--suite")
    yield from check_gym(Config(env=env, gym=gym))
    yield from check_prompts(Config(env=env, prompts=request.prompts))
    yield from check_texts(request.rollout)
    facts = suite_facts(env, gym)
    yield from check_task_ids(env.task_ids, facts, "--tasks")
    if facts is not None and facts.are_states_known and request.states_per_task is not None:
        states = facts.num_eval_states, facts.num_benchmark_states
        if message := missing_states(request.states_per_task, env.suite, env.protocol, *states):
            yield Problem(f"--episodes = {request.states_per_task}", message)


def _states(request: EvalRequest, compared: Sequence[EvalRequest]) -> tuple[int, ...]:
    """The initial states to evaluate on, the same ones of every task; ConfigError where too few remain."""
    env, gym = request.env, request.gym
    facts = suite_facts(env, gym)
    assert facts is not None, "a checked request names a suite that exists"
    states = SuiteStates.of(facts) if facts.are_states_known else _states_of_data(request)
    candidates = states.evaluated(env.protocol)
    used = _used(compared, range(facts.num_tasks), env.task_ids or range(facts.num_tasks), candidates)
    count, as_published = request.states_per_task, request.as_published
    message = None if as_published else too_few_unseen(count, used, len(candidates), env.suite, env.protocol)
    if message is not None:
        raise ConfigError([Problem("--protocol" if count is None else f"--episodes = {count}", message)])
    return choose_states(states, env.protocol, used.states, count, as_published)


def _states_of_data(request: EvalRequest) -> SuiteStates:
    """The rows of the user's data, which has to be read."""
    from vlarl.envs.build import build_prompts  # loads numpy

    spec = build_prompts(request.env.suite, request.prompts).spec
    return SuiteStates(spec.train_states, spec.eval_states, spec.benchmark_states)


def _used(
    compared: Sequence[EvalRequest], all_task_ids: Sequence[int], task_ids: Sequence[int], candidates: Collection[int]
) -> UsedStates:
    """Which of the candidates were used for training in these tasks, and by which checkpoints."""
    env, gym_env = compared[0].env, compared[0].gym.env
    by_task: dict[int, set[int]] = {task_id: set() for task_id in all_task_ids}
    by: list[str] = []
    for request in compared:
        if request.training is None:
            continue
        for task_id in all_task_ids:
            states = request.training.states(env.suite, gym_env, task_id).intersection(candidates)
            by_task[task_id] |= states
            if states and task_id in task_ids:
                by.append(request.checkpoint)
    return UsedStates(
        states=frozenset(state for task_id in task_ids for state in by_task[task_id]),
        task_ids=tuple(task_id for task_id in task_ids if by_task[task_id]),
        free_task_ids=tuple(task_id for task_id in all_task_ids if not by_task[task_id]),
        by=tuple(dict.fromkeys(by)) if len(compared) > 1 else (),
    )


def _sections_of_run(run: Path | None) -> dict[str, dict[str, Any]]:
    """The relevant sections of the configuration of a checkpoint's run; empty for a checkpoint outside a run."""
    data = read_document(run / "config.yaml").data if run is not None else {}
    sections = {name: data.get(name) for name in SECTIONS}
    return {name: content if isinstance(content, dict) else {} for name, content in sections.items()}


def _texts_of_run(rollout: dict[str, Any], suite: str) -> dict[str, Any]:
    """Where the run's texts end, of all that its section `rollout` says."""
    return {name: rollout[name] for name in TextConfig.model_fields if name in rollout} if is_prompts(suite) else {}


def _under(section: str, given: Mapping[str, object]) -> dict[str, Any]:
    prefix = f"{section}."
    return {path.removeprefix(prefix): value for path, value in given.items() if path.startswith(prefix)}


def _validated(model: type[_Model], section: str, values: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        known = options(Config)
        problems = []
        for detail in error.errors(include_url=False):
            path = f"{section}.{detail['loc'][0]}"
            allowed = f"must be {known[path].allowed}" if path in known else "no option of this version of vlarl"
            problems.append(Problem(f"{path} = {shown(detail['input'])}", allowed, (path,)))
        raise ConfigError(problems) from error
