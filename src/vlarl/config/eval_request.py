"""What an evaluation is asked for: a checkpoint, and the sections env, gym and policy; from its run, then as given.

Imports neither torch nor a simulator, so that what can be refused is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from vlarl.config.describe import options
from vlarl.config.env_checks import check_gym, check_suite, check_task_ids
from vlarl.config.known import GYM
from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.schema import Config, EnvConfig, GymConfig, PolicyConfig, Section
from vlarl.config.suites import suite_facts
from vlarl.config.yaml_source import read_document
from vlarl.errors import UsageError
from vlarl.types import Task

StateProtocol = Literal["disjoint", "benchmark"]
Videos = int | Literal["all", "failures"]

DEFAULT_EPISODES = 20  # a task, where so many initial states exist
SECTIONS = ("env", "gym", "policy")

NOT_OF_A_RUN = ("task_ids", "num_envs", "cameras")  # what to evaluate, this machine's, the checkpoint's
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
    trained_protocol: StateProtocol | None  # of the run that trained it on this suite; None: not known
    states_per_task: int | None = None  # None: all that the protocol has, up to DEFAULT_EPISODES
    temperature: float = 0.0
    seed: int = 0
    videos: Videos = 0
    device: str = "auto"
    replay: Task | None = None  # the one episode to run, which need not be one of the protocol's


def eval_request(
    checkpoint: str | Path,
    given: Mapping[str, object],
    *,
    states_per_task: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    videos: Videos = 0,
    device: str = "auto",
    episode: str | None = None,
) -> EvalRequest:
    """The request for a checkpoint: options of its run, and over them those given as `{"env.suite": …}`.

    `episode` is the id of one episode to run again, in its suite.
    Raises ConfigError with everything that is wrong and can be seen without a simulator.
    """
    run = _sections_of_run(str(checkpoint))
    asked = {section: _under(section, given) for section in SECTIONS}
    replay = None if episode is None else task_of(episode)
    if replay is not None:
        asked["env"]["suite"] = replay.suite
    run_suite = run["env"].get("suite")
    suite = asked["env"].get("suite") or run_suite or EnvConfig().suite
    is_own_suite = suite == run_suite
    dropped = NOT_OF_A_RUN if is_own_suite else (*NOT_OF_A_RUN, *OF_ONE_SUITE)
    kept = {name: value for name, value in run["env"].items() if name not in dropped}
    env = _validated(EnvConfig, "env", {"protocol": "benchmark", **kept, **asked["env"], "suite": suite})
    request = EvalRequest(
        checkpoint=str(checkpoint),
        env=env,
        gym=_validated(GymConfig, "gym", {**(run["gym"] if suite == GYM else {}), **asked["gym"]}),
        policy=_validated(PolicyConfig, "policy", {**run["policy"], **asked["policy"]}),
        trained_protocol=run["env"].get("protocol", EnvConfig().protocol) if is_own_suite else None,
        states_per_task=states_per_task,
        temperature=temperature,
        seed=seed,
        videos=videos,
        device=device,
        replay=replay,
    )
    if problems := list(_problems(request)):
        raise ConfigError(problems)
    return request


def task_of(episode_id: str) -> Task:
    """The task that `Task.episode_id` names."""
    match = _EPISODE_ID.fullmatch(episode_id)
    if match is None:
        example = Task("libero_spatial", 3, 17, 0x4D122750A6710509).episode_id
        raise UsageError(
            f"{episode_id!r} is no episode's id: take one from episodes.jsonl or results.json, such as {example}."
        )
    return Task(match["suite"], int(match["task"]), int(match["state"]), int(match["seed"], 16))


def run_of(checkpoint: str) -> Path | None:
    """The folder of the run that a checkpoint belongs to; None for any other checkpoint."""
    folder = Path(checkpoint).expanduser().resolve()
    run = folder.parent.parent
    is_of_run = folder.is_dir() and folder.parent.name == "checkpoints" and (run / "config.yaml").is_file()
    return run if is_of_run else None


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


def _problems(request: EvalRequest) -> Iterator[Problem]:
    env, gym = request.env, request.gym
    yield from check_suite(env.suite, "--suite")
    yield from check_gym(Config(env=env, gym=gym))
    facts = suite_facts(env, gym)
    yield from check_task_ids(env.task_ids, facts, "--tasks")
    if facts is not None and request.states_per_task is not None:
        states = facts.num_eval_states, facts.num_benchmark_states
        if message := missing_states(request.states_per_task, env.suite, env.protocol, *states):
            yield Problem(f"--episodes = {request.states_per_task}", message)


def _sections_of_run(checkpoint: str) -> dict[str, dict[str, Any]]:
    """The sections that matter of the configuration of a checkpoint's run; empty ones for any other checkpoint."""
    run = run_of(checkpoint)
    data = read_document(run / "config.yaml").data if run is not None else {}
    sections = {name: data.get(name) for name in SECTIONS}
    return {name: content if isinstance(content, dict) else {} for name, content in sections.items()}


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
