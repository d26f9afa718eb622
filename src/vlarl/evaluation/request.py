"""The request for an evaluation: a checkpoint, and the sections env, gym and policy, first from its run, then as given.

Imports neither torch nor a simulator, so that errors in the options are reported at once.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import ValidationError

from vlarl.config.describe import options
from vlarl.config.known import GYM, PROMPTS, is_prompts
from vlarl.config.problems import ConfigError, Problem, shown
from vlarl.config.rules.distributed import check_distributed
from vlarl.config.rules.effects import without_effect
from vlarl.config.rules.env import check_gym, check_prompts, check_suite, check_suites, check_task_ids
from vlarl.config.rules.sampling import check_texts
from vlarl.config.run_checkpoints import ADAPTER, locate_checkpoint
from vlarl.config.schema import (
    Config,
    DistributedConfig,
    EnvConfig,
    GymConfig,
    PolicyConfig,
    PromptsConfig,
    RolloutConfig,
    RunConfig,
    SaveFilter,
    SaveFormat,
    Section,
    TextConfig,
    VllmConfig,
)
from vlarl.config.source.yaml_file import read_document
from vlarl.config.state_choice import UsedStates, choose_states, missing_states, too_few_unseen
from vlarl.config.suites import BOTH, StateProtocol, SuiteStates, each_suite, suite_facts, suites_of
from vlarl.config.training_data import TrainingData, local_folder, run_of, training_data_of
from vlarl.config.trust import refuse_untrusted
from vlarl.errors import MissingExtraError, UsageError
from vlarl.types import Task

Videos = int | Literal["all", "failures"]


class EvalOptions(Section):
    """The sections of a configuration that an evaluation reads."""

    env: EnvConfig = EnvConfig()
    gym: GymConfig = GymConfig()
    prompts: PromptsConfig = PromptsConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: TextConfig = TextConfig()
    vllm: VllmConfig = VllmConfig()
    distributed: DistributedConfig = DistributedConfig()


SECTIONS = tuple(EvalOptions.model_fields)

NOT_OF_A_RUN = (
    "task_ids",
    "suite_tasks",
    "num_envs",
    "cameras",
)  # what to evaluate; depends on this machine; set by the checkpoint
OF_ONE_SUITE = ("protocol", "max_steps")
OF_LEARNERS = (
    "distributed.learners_per_node",
    "distributed.sharding",
    "distributed.shard_group_size",
    "distributed.cpu_offload",
    "distributed.compute_dtype",
    "distributed.num_reward_workers",
    "distributed.colocate",
    "distributed.learner_gpus",
    "distributed.reward_gpus",
    "distributed.restarts",
    "distributed.asynchronous",
    "distributed.max_staleness",
    "distributed.sync_bucket_mb",
    "distributed.sync_checksum",
    "vllm.sync_backend",
)
"""Options of a cluster that an evaluation has no use for."""

_EPISODE_ID = re.compile(r"(?P<suite>.+)-t(?P<task>\d{2,})-s(?P<state>\d{3,})-(?P<seed>[0-9a-f]{16})")
_Model = TypeVar("_Model", bound=Section)


@dataclass(frozen=True)
class Saving:
    """Whether and which episodes are saved as datasets, as in the section `rollout`."""

    kind: SaveFormat = "none"
    which: SaveFilter = "all"
    every: int = 1
    fps: int | None = None


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
    by_protocol: dict[StateProtocol, tuple[int, ...]] = field(default_factory=dict)  # of both protocols: their states
    temperature: float = 0.0
    seed: int = 0
    videos: Videos = 0
    saving: Saving = Saving()
    device: str = "auto"
    replay: Task | None = None  # the one episode to run, which need not be one of the protocol's
    prompts: PromptsConfig = PromptsConfig()
    rollout: TextConfig = TextConfig()  # where texts end
    vllm: VllmConfig = VllmConfig()
    distributed: DistributedConfig = DistributedConfig()  # where it is run: in this process, or on a cluster
    also: tuple[EvalRequest, ...] = ()  # further suites that are evaluated with it

    @property
    def suites(self) -> tuple[EvalRequest, ...]:
        """One request for each suite."""
        return (self, *self.also)

    def config(self) -> Config:
        """The request as the configuration of a run, which parts of it are built from; of the one suite, or of all
        where `env` names them."""
        return Config(
            run=RunConfig(seed=self.seed, device=self.device),
            env=self.env,
            gym=self.gym,
            prompts=self.prompts,
            policy=self.policy.model_copy(update={"path": self.checkpoint}),
            rollout=RolloutConfig(**self.rollout.model_dump()),
            vllm=self.vllm,
            distributed=self.distributed,
        )

    @property
    def label(self) -> str:
        """The suites as one name."""
        return "+".join(each.env.suite for each in self.suites)


def eval_request(
    checkpoint: str | Path,
    given: Mapping[str, object],
    *,
    training: TrainingData | None = None,
    states_per_task: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    videos: Videos = 0,
    saving: Saving = Saving(),  # noqa: B008 - frozen
    device: str = "auto",
    episode: str | None = None,
    trust: bool = False,
) -> EvalRequest:
    """The request for a checkpoint or a run: the options of its run, overridden by those given as `{"env.suite": …}`.

    `training` is the training data of a checkpoint that is not on this machine yet; otherwise it is read here.
    Several suites (`env.suites`) are evaluated with one protocol, each on the episodes that it has alone with that.
    The protocol `both` means the states of either protocol, whose results are reported side by side.
    `episode` is the id of one episode to run again, in its suite. `trust`: code that the run's configuration names may
    be run, even if another user wrote it.
    Raises ConfigError with every problem that can be found without a simulator.
    """
    checkpoint = locate_checkpoint(checkpoint).path
    training = training or training_data_of(checkpoint)
    folder = run_of(str(checkpoint))
    run = _sections_of_run(folder)
    requested = {section: _under(section, given) for section in SECTIONS}
    is_both = requested["env"].get("protocol") == BOTH
    if is_both:
        requested["env"]["protocol"], given = "benchmark", {**given, "env.protocol": "benchmark"}
    replay = None if episode is None else task_of(episode)
    if replay is not None:
        requested["env"] |= {"suite": replay.suite, "suites": ()}
    given_suites, run_suites = _suites(requested["env"]), _suites(run["env"])
    suites = given_suites or run_suites or (_trained_suite(training),)
    suite = suites[0]
    dropped = NOT_OF_A_RUN if set(suites) <= set(run_suites) else (*NOT_OF_A_RUN, *OF_ONE_SUITE)
    kept = {name: value for name, value in run["env"].items() if name not in dropped}
    several = {"suite": suite, "suites": suites if len(suites) > 1 else ()}
    protocols = (training.protocol(name) for name in suites) if training is not None else ()
    own_protocol = next((protocol for protocol in protocols if protocol), None)
    protocol = {"protocol": own_protocol or "benchmark"}
    env = _validated(EnvConfig, "env", {**protocol, **kept, **requested["env"], **several})
    if videos and is_prompts(suite):
        raise UsageError(
            f"videos: prompts ({suite}) have none, so leave it out; samples.jsonl of the results has the responses."
        )
    _refuse_saving(saving, suite)
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
        saving=saving,
        device=device,
        replay=replay,
        prompts=_validated(
            PromptsConfig, "prompts", {**(run["prompts"] if suite == PROMPTS else {}), **requested["prompts"]}
        ),
        rollout=_validated(TextConfig, "rollout", {**_texts_of_run(run["rollout"], suite), **requested["rollout"]}),
        vllm=_validated(VllmConfig, "vllm", requested["vllm"]),
        distributed=_validated(DistributedConfig, "distributed", requested["distributed"]),
    )
    needless = [Problem(path, "an evaluation has no learners; leave it out") for path in OF_LEARNERS if path in given]
    config = request.config()
    # How it is loaded is checked when it is loaded: what the run was configured with fits its checkpoint.
    unread = without_effect(config.model_copy(update={"policy": PolicyConfig()}), given)
    if problems := [*_problems(request), *needless, *_of_cluster(config)] or list(unread):
        raise ConfigError(problems)
    if folder is not None and not trust:
        used = {"env": request.env.model_dump(), "gym": request.gym.model_dump()}
        refuse_untrusted(folder / "config.yaml", used, given)
    if replay is not None:
        return request
    each = [replace(request, env=one) for one in each_suite(env)]
    parts = [on_both(part) if is_both else replace(part, init_states=_states(part, [part])) for part in each]
    return replace(parts[0], also=tuple(parts[1:]))


def _refuse_saving(saving: Saving, suite: str) -> None:
    """Refuse to save what can't be saved."""
    if saving == Saving():
        return
    if saving.kind == "none":
        raise UsageError("--save-filter, --save-every and --save-fps say how episodes are saved: add --save rlds.")
    if is_prompts(suite):
        raise UsageError(
            f"--save {saving.kind}: responses to prompts ({suite}) are texts, which samples.jsonl of the results has."
        )
    if saving.kind == "lerobot" and saving.fps is None:
        raise UsageError("--save lerobot: a LeRobot dataset says how many steps a second has: give --save-fps.")
    if saving.kind == "rlds" and saving.fps is not None:
        raise UsageError("--save-fps describes a LeRobot dataset: set --save to lerobot, or leave it out.")
    if saving.kind == "lerobot" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "data")


def on_both(request: EvalRequest) -> EvalRequest:
    """The request for the states of both protocols, all of them unless a count is given; ConfigError where they are
    the same."""
    facts = suite_facts(request.env, request.gym)
    states = SuiteStates.of(facts) if facts is not None and facts.are_states_known else SuiteStates((), (), ())
    if set(states.eval) == set(states.benchmark):
        remedy = f"the two protocols of {request.env.suite} have the same initial states; leave --protocol out"
        raise ConfigError([Problem("--protocol = both", remedy)])
    protocols: tuple[StateProtocol, ...] = get_args(StateProtocol)
    chosen = {protocol: states.evaluated(protocol)[: request.states_per_task] for protocol in protocols}
    return replace(request, init_states=tuple(sorted({*chain(*chosen.values())})), by_protocol=chosen)


def _of_cluster(config: Config) -> Iterator[Problem]:
    """Problems of engines and workers."""
    yield from check_distributed(config)
    folder = local_folder(config.policy.path)
    if config.vllm.num_engines and folder is not None and (folder / ADAPTER).is_file():
        remedy = (
            f"vLLM reads whole checkpoints, and {config.policy.path} is an adapter; make one of it with `vlarl merge`, "
            "or use the torch engines: vllm.num_engines 0"
        )
        yield Problem(f"vllm.num_engines = {config.vllm.num_engines}", remedy)


def _suites(env: Mapping[str, Any]) -> tuple[str, ...]:
    """The suites that a section env names; empty if it names none."""
    several = env.get("suites")
    if isinstance(several, list | tuple) and several:
        return tuple(str(suite) for suite in several)
    return (str(env["suite"]),) if env.get("suite") else ()


def _trained_suite(training: TrainingData | None) -> str:
    return (training and training.suite) or EnvConfig().suite


def on_the_same_states(a: EvalRequest, b: EvalRequest) -> tuple[EvalRequest, EvalRequest]:
    """Two requests that differ in their checkpoint, on initial states that neither of them was trained on."""
    pairs = []
    for ours, theirs in zip(a.suites, b.suites, strict=True):
        states = ours.init_states if ours.by_protocol else _states(ours, [ours, theirs])
        pairs.append((replace(ours, init_states=states, also=()), replace(theirs, init_states=states, also=())))
    (first, second), more = pairs[0], pairs[1:]
    return replace(first, also=tuple(x for x, _ in more)), replace(second, also=tuple(y for _, y in more))


def same_episodes(request: EvalRequest) -> dict[str, object]:
    """The options that make a second request run the episodes of this one, whatever its own run would choose."""
    shared = {f"env.{name}": getattr(request.env, name) for name in ("suite", "protocol", "max_steps")}
    if request.by_protocol:
        shared["env.protocol"] = BOTH
    if request.also:
        shared |= {"env.suites": tuple(each.env.suite for each in request.suites)}
        shared |= {"env.suite_tasks": {r.env.suite: r.env.task_ids for r in request.suites if r.env.task_ids}}
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
    for suite in suites_of(env):
        yield from check_suite(suite, "--suite")
    yield from check_suites(env)
    yield from check_gym(Config(env=env, gym=gym))
    yield from check_prompts(Config(env=env, prompts=request.prompts))
    yield from check_texts(request.rollout)
    for one in each_suite(env):
        yield from check_task_ids(one.task_ids, suite_facts(one, gym), "--tasks")
    facts = suite_facts(env, gym)
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
