"""The Python interface: the commands as functions with the same names, which also accept callables in place of names.

    train ──► load_config or the resumed run's configuration ──► loop.train
    evaluate, compare ──► eval_request ──► evaluation.run_evaluation
    finetune ──► load_config ──► data.finetune.finetune

Mistakes raise UsageError with the message of the command line, with its flags as Python arguments (python_messages).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vlarl.callbacks import Callbacks, EpisodeRecord, IterationRecord
from vlarl.cli.configured import FINETUNE_PRESET, Request, resumed_run
from vlarl.config.callables import refuse_unsendable
from vlarl.config.describe import options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.problems import ConfigError, Problem, nearest
from vlarl.config.resume_command import refuse_without_callables
from vlarl.config.reward_module import refuse_arguments
from vlarl.config.run_checkpoints import locate_checkpoint
from vlarl.config.schema import Config, SaveFilter, SaveFormat
from vlarl.config.source.flags import Flags, from_mapping, suggestion
from vlarl.config.source.load import Overrides, as_flags, load_config
from vlarl.config.source.spelling import suite_name
from vlarl.config.suites import StateProtocol
from vlarl.errors import UsageError
from vlarl.evaluation.request import (
    SECTIONS,
    EvalRequest,
    Saving,
    Videos,
    eval_request,
    on_the_same_states,
    same_episodes,
)
from vlarl.python_messages import explained
from vlarl.types import EvalResult, Trajectory

if TYPE_CHECKING:
    from vlarl.evaluation.compare import Comparison
    from vlarl.evaluation.record import EvalRecord
    from vlarl.run.finetune import FinetuneSummary
    from vlarl.run.session import RunSummary


@explained
def train(
    source: str | Path | Config | None = None,
    overrides: Overrides = (),
    *,
    resume: str | Path | None = None,
    reward: Callable[[Trajectory], float] | str | None = None,
    env: Callable[..., Any] | str | None = None,
    on_iteration: Callable[[IterationRecord], object] | None = None,
    on_episode: Callable[[EpisodeRecord], object] | None = None,
    trust: bool = False,
) -> RunSummary:
    """Improve a policy by reinforcement learning, as `vlarl train` does.

    `source` is a preset, a YAML file or a configuration. Without one, a run starts from the preset of the suite or of
    the policy's size in the `overrides` (docs/configuration.md), else from tabletop_grpo, or from the defaults of all
    options if `env` is given. `overrides` are options as `{"optim.lr": 1e-4}`, or flags as a list. `resume` continues a
    run, by its name, its folder or a checkpoint in it.

    `reward` is called with each episode and returns a finite number. `env` makes a gymnasium.Env: it is called once in
    the process of each environment, with the options of `gym.kwargs`. A callable is not saved with the run: give it
    again to resume. `on_iteration` and `on_episode` are described in vlarl/callbacks.py; an exception in them ends the
    run, which is saved as after any other failure. `trust` runs the code that the configuration of another user's run
    names (docs/security.md).

    >>> import vlarl
    >>> summary = vlarl.train("tabletop_grpo", {"run.seed": 1, "run.iterations": 2})  # doctest: +SKIP
    >>> summary.success_before, summary.success_after  # doctest: +SKIP
    (0.31, 0.335)
    >>> def quick(trajectory):
    ...     return 1.0 - trajectory.length / 100 if trajectory.success else 0.0
    >>> summary = vlarl.train(reward=quick, on_iteration=lambda record: print(record.metrics))  # doctest: +SKIP
    >>> summary = vlarl.train(resume=summary.run_dir, reward=quick)  # doctest: +SKIP
    """
    callbacks = Callbacks(_callable("on_iteration", on_iteration), _callable("on_episode", on_episode))
    given: dict[str, object] = {}
    if reward is not None:
        given["reward.source"] = _reward(reward)
    if env is not None:
        given |= {"env.suite": "gym", "gym.env": _env(env, "{'env.suite': %r} in the overrides")}
    flags = _flags(overrides, given, Config)
    folder, checkpoint = None, None
    if resume is not None:
        named: object = resume  # callers may pass anything
        if not isinstance(named, str | Path):
            raise UsageError(f"resume = {named!r}: give the name or folder of a run, or a checkpoint in it")
        if source is not None:
            raise UsageError("resume reads the run's own configuration; leave out the preset or file before it")
        config, folder, checkpoint = resumed_run(Request(None, flags, resume=str(resume), trust=trust), Config)
        refuse_without_callables(config, folder)
    else:
        config = load_config(Config() if source is None and env is not None else source, flags, trust=trust)
    from vlarl.loop import train as run  # loads torch, which takes seconds

    return run(config, folder, checkpoint, callbacks)


@explained
def evaluate(
    checkpoint: str | Path,
    suite: str | Sequence[str] | None = None,
    tasks: Sequence[int] | None = None,
    episodes: int | None = None,
    temperature: float = 0.0,
    num_envs: int | None = None,
    videos: Videos | str = 0,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    protocol: StateProtocol | None = None,
    *,
    save: SaveFormat = "none",
    save_filter: SaveFilter = "all",
    save_every: int = 1,
    save_fps: int | None = None,
    overrides: Overrides = (),
    env: Callable[..., Any] | str | None = None,
    on_episode: Callable[[EpisodeRecord], object] | None = None,
    trust: bool = False,
) -> EvalResult:
    """Measure how often a checkpoint succeeds, as `vlarl eval` does.

    `checkpoint` is a folder, a hub id, a built-in name, or a run by its name or folder. The other arguments are those
    of the command: `suite` is one or a list of several; `episodes` counts per task; `videos` is all, failures, none or
    a count, and needs `out`, the new folder for the results, without which nothing is written. So does `save`, rlds or
    lerobot, which saves the episodes as datasets. `overrides` are options
    of the sections env, gym and policy, such as `{"policy.actions": "l1"}`. What is not given is taken from the
    checkpoint's run; `trust` runs the code that the configuration of another user's run names (docs/security.md).

    >>> import vlarl
    >>> result = vlarl.evaluate("builtin:tiny-oft", suite="tabletop_goal", tasks=[0, 3], episodes=5)  # doctest: +SKIP
    >>> f"{result.won} of {len(result.counted)}, {result.success_rate:.0%}"  # doctest: +SKIP
    '4 of 10, 40%'
    """
    given = _eval_options(suite, tasks, num_envs, protocol, env)
    saving = _saving(Saving(save, save_filter, save_every, save_fps), out)
    arguments = _EvalArguments(episodes, temperature, seed, _videos(videos, out), device, trust, saving)
    request = _request(checkpoint, _flags(overrides, given, Config), arguments)
    return _run(request, out, _callable("on_episode", on_episode)).result


@explained
def compare(
    first: str | Path,
    second: str | Path,
    suite: str | Sequence[str] | None = None,
    tasks: Sequence[int] | None = None,
    episodes: int | None = None,
    temperature: float = 0.0,
    num_envs: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    protocol: StateProtocol | None = None,
    *,
    overrides: Overrides = (),
    env: Callable[..., Any] | str | None = None,
    trust: bool = False,
) -> Comparison:
    """Evaluate two checkpoints on the same episodes, as `vlarl eval FIRST --against SECOND` does.

    The arguments are those of `evaluate`; the results go into the folders A and B of `out`.

    >>> import vlarl
    >>> comparison = vlarl.compare("first-run", "builtin:tiny-oft", episodes=20)  # doctest: +SKIP
    >>> print(comparison.in_words())  # doctest: +SKIP
    A wins 31, B wins 6 of 37 episodes on which they differ (200 compared): p < 1e-4, A is better.
    """
    flags = _flags(overrides, _eval_options(suite, tasks, num_envs, protocol, env), Config)
    arguments = _EvalArguments(episodes, temperature, seed, 0, device, trust)
    request = _request(first, flags, arguments)
    flags.values |= same_episodes(request)
    requests = on_the_same_states(request, _request(second, flags, arguments))
    folders = [None if out is None else Path(out) / name for name in ("A", "B")]
    from vlarl.evaluation.compare import compare as paired

    records = [_run(each, folder, None) for each, folder in zip(requests, folders, strict=True)]
    if not all(record.result.complete for record in records):
        raise KeyboardInterrupt
    return paired(*records)


@explained
def finetune(
    source: str | Path | FinetuneConfig | None = None,
    overrides: Overrides = (),
    *,
    resume: str | Path | None = None,
) -> FinetuneSummary:
    """Make a base policy from demonstrations, as `vlarl finetune` does.

    `source` is a preset, a YAML file or a configuration; without one it is the preset tabletop_base. `resume` names a
    run to resume from its newest checkpoint, or a checkpoint in it.

    >>> import vlarl
    >>> summary = vlarl.finetune("tabletop_base", {"optim.steps": 200, "optim.warmup_steps": 20})  # doctest: +SKIP
    >>> policy = vlarl.load_policy(summary.checkpoint)  # doctest: +SKIP
    """
    if resume is None:
        config = load_config(FINETUNE_PRESET if source is None else source, overrides, schema=FinetuneConfig)
        folder = checkpoint = None
    elif source is not None:
        raise UsageError("resume reads the run's own configuration; leave out the preset or file before it")
    else:
        request = Request(None, as_flags(overrides, FinetuneConfig), resume=str(resume))
        config, folder, checkpoint = resumed_run(request, FinetuneConfig)
    from vlarl.run.finetune import finetune as run  # loads torch, which takes seconds

    return run(config) if folder is None else run(config, folder, checkpoint)


class _EvalArguments:
    """The arguments of an evaluation that are not options of the configuration, checked as on the command line."""

    def __init__(
        self,
        episodes: int | None,
        temperature: float,
        seed: int,
        videos: Videos,
        device: str,
        trust: bool,
        saving: Saving = Saving(),  # noqa: B008 - frozen
    ) -> None:
        problems = []
        if episodes is not None and (not _is_whole(episodes) or episodes < 1):
            problems.append(Problem(f"episodes = {episodes!r}", "must be an integer above 0", ("episodes",)))
        if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
            problems.append(Problem(f"temperature = {temperature!r}", "must be 0 (greedy) or above", ("temperature",)))
        if not _is_whole(seed) or seed < 0:
            problems.append(Problem(f"seed = {seed!r}", "must be an integer, 0 or above", ("seed",)))
        if problems:
            raise ConfigError(problems)
        self.episodes, self.temperature, self.seed = episodes, float(temperature), seed
        self.videos, self.device, self.trust, self.saving = videos, device, trust, saving


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _videos(videos: Videos | str, out: str | Path | None) -> Videos:
    """all, failures, none or a count; the videos are written into `out`."""
    words: dict[object, Videos] = {"all": "all", "failures": "failures", "none": 0}
    if isinstance(videos, str) and videos in words:
        chosen = words[videos]
    elif isinstance(videos, int) and not isinstance(videos, bool) and videos >= 0:
        chosen = videos
    else:
        raise UsageError(f"videos = {videos!r}: must be all, failures, none or a count")
    if chosen and out is None:
        raise UsageError(f"videos = {videos!r}: name the new folder that they are written to with out=")
    return chosen


def _saving(saving: Saving, out: str | Path | None) -> Saving:
    """How episodes are saved, checked as on the command line; they are written into `out`."""
    for name, value, allowed in (
        ("save", saving.kind, get_args(SaveFormat)),
        ("save_filter", saving.which, get_args(SaveFilter)),
    ):
        if value not in allowed:
            raise UsageError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
    for name, count in (("save_every", saving.every), ("save_fps", saving.fps)):
        if count is not None and (not _is_whole(count) or count < 1):
            raise UsageError(f"{name} = {count!r}: must be an integer above 0")
    if saving.kind != "none" and out is None:
        raise UsageError(f"save = {saving.kind!r}: name the new folder that episodes are written to with out=")
    return saving


def _eval_options(
    suite: str | Sequence[str] | None,
    tasks: Sequence[int] | None,
    num_envs: int | None,
    protocol: StateProtocol | None,
    env: Callable[..., Any] | str | None,
) -> dict[str, object]:
    if isinstance(tasks, str | int):
        raise UsageError(f"tasks = {tasks!r}: give a list of task ids, such as [0, 3]")
    named: dict[str, object] = {"num_envs": num_envs, "protocol": protocol}
    named |= {"suite": suite} if suite is None or isinstance(suite, str) else {"suites": tuple(suite)}
    given: dict[str, object] = {f"env.{name}": value for name, value in named.items() if value is not None}
    if tasks is not None:
        given["env.task_ids"] = tuple(tasks)
    if env is not None:
        given |= {"env.suite": "gym", "gym.env": _env(env, "suite=%r")}
    return given


def _request(checkpoint: str | Path, flags: Flags, arguments: _EvalArguments) -> EvalRequest:
    from vlarl.policies.locate import hub_training_data  # loads torch, which takes seconds

    own = [path for path in flags.values if path.partition(".")[0] in SECTIONS]
    if unknown := [path for path in own if path not in options(Config)]:
        raise ConfigError([Problem(path, "unknown option" + suggestion(path, Config)) for path in unknown])
    if others := [path for path in flags.values if path.partition(".")[0] not in SECTIONS]:
        raise UsageError(
            f"{', '.join(others)}: an evaluation reads options of {', '.join(SECTIONS)} only, and its own arguments"
        )
    found = locate_checkpoint(checkpoint).path
    request = eval_request(
        found,
        flags.values,
        training=hub_training_data(found),
        states_per_task=arguments.episodes,
        temperature=arguments.temperature,
        seed=arguments.seed,
        videos=arguments.videos,
        saving=arguments.saving,
        device=arguments.device,
        trust=arguments.trust,
    )
    request.gym.given.update(flags.given.get("gym", {}))
    return request


def _run(
    request: EvalRequest, out: str | Path | None, on_episode: Callable[[EpisodeRecord], object] | None
) -> EvalRecord:
    from vlarl.evaluation.run import run_evaluation  # loads torch, which takes seconds

    callbacks = Callbacks(on_episode=on_episode)
    return run_evaluation(
        request,
        None if out is None else Path(out),
        lambda result, done, total: callbacks.episode(EpisodeRecord(0, "eval", result)),
    )


def _flags(overrides: Overrides, given: Mapping[str, object], schema: type[Config]) -> Flags:
    """The overrides and the options given by arguments; UsageError for an option that is given by both."""
    flags = as_flags(overrides, schema)
    more = from_mapping(given)
    if twice := sorted(flags.values.keys() & more.values.keys()):
        raise UsageError(f"{', '.join(twice)}: given by an argument and in the overrides; leave one of them out")
    flags.values |= more.values
    for section, callables in more.given.items():
        flags.given.setdefault(section, {}).update(callables)
    return flags


def _callable(argument: str, function: Callable[..., object] | None) -> Callable[..., object] | None:
    given: object = function  # callers may pass anything
    if given is not None and not callable(given):
        raise UsageError(f"{argument}: give a function that takes one record, not {type(given).__name__}")
    return function


def _reward(reward: Callable[[Trajectory], float] | str) -> Callable[[Trajectory], float] | str:
    given: object = reward
    if not isinstance(given, str) and not callable(given):
        kind = type(given).__name__
        raise UsageError(f"reward: give a function that takes a Trajectory and returns a number, not {kind}")
    if not isinstance(given, str):
        refuse_arguments("reward: the function", given)
    return reward


def _env(env: Callable[..., Any] | str, suite_option: str) -> Callable[..., Any] | str:
    """The factory of an environment, or its id; `suite_option` is how a suite is given instead."""
    if isinstance(env, str):
        if suite := nearest(suite_name(env), KNOWN_SUITES, cutoff=0.85):
            raise UsageError(
                f"env = {env!r}: a suite of tasks is chosen by {suite_option % suite}; env takes a function that makes "
                "a Gymnasium environment, or its id."
            )
        return env
    given: object = env
    if not callable(given):
        raise UsageError(
            f"env: give a function or class that makes the environment, not {type(given).__name__}: each process makes "
            "its own"
        )
    refuse_unsendable("env", env)
    return env
