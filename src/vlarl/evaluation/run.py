"""How often a policy succeeds on fixed initial states: for the loop, for `vlarl eval` and from Python.

api, cli ──► run_evaluation ──► evaluate_policy ◄── loop
              EvalLedger: every episode on disk as it ends
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from vlarl import __version__
from vlarl.config.known import GYM, PROMPTS, is_prompts
from vlarl.config.schema import Config, EnvConfig
from vlarl.config.state_choice import state_warnings
from vlarl.config.suites import num_configured_tasks
from vlarl.data.rollouts import EvaluatedEpisodes
from vlarl.decisions import Sampling
from vlarl.devices import choose_device
from vlarl.envs.base import SuiteSpec
from vlarl.envs.build import build_pool
from vlarl.errors import UsageError
from vlarl.evaluation.record import LOGS, EvalDirectory, EvalRecord, EvalSettings, of_both_protocols, united_settings
from vlarl.evaluation.request import EvalRequest, Saving, Videos
from vlarl.interrupt import Interrupted, InterruptGuard
from vlarl.observability.capacity import READER_MIB, check_memory_for_envs
from vlarl.observability.log_file import log_to_file
from vlarl.observability.machine import describe_machine
from vlarl.observability.samples import PER_EVALUATION, SampleRecorder, evenly_chosen, reduced, shown_prompt
from vlarl.policies.load import checkpoint_folder, load_acting_policy
from vlarl.rollout.collector import Collector, Episode
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.rollout.sampling import check_sampling, evaluation_sampling
from vlarl.rollout.steps import Choice, RecordingPlan, no_episode
from vlarl.rollout.tasks import chosen_task_ids, tasks_from_states
from vlarl.rollout.usable import usable_tasks
from vlarl.run.parts import ActingParts, check_fit, env_with_cameras
from vlarl.run.parts import num_envs as configured_num_envs
from vlarl.types import EpisodeResult, EvalResult, Task, Trajectory

log = logging.getLogger(__name__)


OnResult = Callable[[EpisodeResult, int, int], None]
"""Called with each episode as it ends, how many have ended, and how many there are."""


def run_evaluation(
    request: EvalRequest, folder: Path | None = None, on_result: OnResult = lambda result, done, total: None
) -> EvalRecord:
    """Evaluate as requested. After a Ctrl-C the record holds the episodes that had ended, and is not complete."""
    if folder is not None:
        EvalDirectory.refuse_existing(folder)
    sampling = evaluation_sampling(request.rollout, request.temperature)
    config = replace(request, env=united_env(request)).config()
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_removed_if_refused(folder))
        acting = _start(config, _pool_size(request), folder, stack)
        stack.callback(acting.close)
        policy, pool = acting.policy, acting.pool
        env = env_with_cameras(config, policy)
        tasks = requested_tasks(request, pool.spec)
        check_sampling(policy, sampling, request.prompts.max_tokens or 0)
        if request.replay is None:
            tasks = usable_tasks(tasks, request.prompts, policy, pool, sampling)
        check_fit(policy, pool, tasks[0])
        collector = Collector(pool, policy, acting.engine, env.retries)
        ledger = EvalLedger(settings_of(request, env, pool.spec, tasks), tasks, request.videos, folder, request.saving)

        with ledger, InterruptGuard() as guard:
            try:
                for _, result, _ in evaluate_policy(
                    collector,
                    tasks,
                    sampling,
                    ledger.num_videos,
                    guard.check,
                    ledger.num_samples,
                    ledger.saves,
                    ledger.episode_ended,
                ):
                    on_result(ledger.take(result), len(ledger.ended), len(tasks))
            except Interrupted:
                log.warning("interrupted after %d of %d episodes", len(ledger.ended), len(tasks))
    return ledger.record


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """An evaluation that does not begin leaves nothing behind, although its workers have written logs by then."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if not EvalDirectory(folder).results_file.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # one that has other files stays
                for path in missing[1:]:
                    path.rmdir()
        raise


def _start(config: Config, num_envs: int, folder: Path | None, stack: ExitStack) -> ActingParts:
    """The policy, its environments and its engine: in this process, or on the workers of a cluster.

    Workers write their logs into the folder of the results, or where that is not named into one that is removed.
    """
    if config.distributed.backend == "ray":
        from vlarl.run.cluster import launch_evaluation  # Ray is an extra

        path = stack.enter_context(TemporaryDirectory()) if folder is None else folder
        return launch_evaluation(with_absolute_checkpoint(config), num_envs, Path(path) / LOGS)
    device = choose_device(config.run.device)
    policy = load_acting_policy(config, None, device).eval()
    env = env_with_cameras(config, policy)
    image_size = env.image_size or policy.image_size
    pool = build_pool(env, config.gym, num_envs, image_size, "sparse", config.prompts)
    return ActingParts(policy, pool, TorchEngine(policy, device), pool.close)


def with_absolute_checkpoint(config: Config) -> Config:
    """The configuration for workers, whose working directory is another one."""
    path = Path(config.policy.path).expanduser()
    if not path.is_dir():
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(path.absolute())})})


def evaluate_policy(
    collector: Collector,
    tasks: Sequence[Task],
    sampling: Sampling,
    num_videos: int = 0,
    check: Callable[[], None] = lambda: None,
    num_samples: int = 0,
    saves: Choice = no_episode,
    ended: Callable[[Episode], None] = lambda episode: None,
) -> Iterator[tuple[int, EpisodeResult, Trajectory]]:
    """Run every task once: each episode as it ends, with the index of its task.

    `num_videos` of the results carry the frames of their video, and `num_samples` the images of their prompt, reduced;
    both are evenly distributed over the tasks. `saves` says of which tasks every step is recorded, and `ended` is
    called with each episode. `check` may raise to stop. Drop the trajectories when they are scored:
    the images of hundreds of episodes would fill the memory.
    """
    suites = collector.pool.spec.suites
    instructions = {(suite.name, task.task_id): task.instruction for suite in suites for task in suite.tasks}
    sampled = frozenset(evenly_chosen(len(tasks), num_samples))
    shown = {tasks[index] for index in recorded_tasks(len(tasks), num_videos)}
    plan = RecordingPlan(shown.__contains__, saves)
    for index, episode in collector.episodes(tasks, sampling, plan, check):
        ended(episode)
        trajectory = episode.trajectory
        seen = [decision.observation.instruction for decision in trajectory.transitions[:1]]
        instruction = seen[0] if seen else instructions[trajectory.task.key]
        result = EpisodeResult.of(trajectory, instruction, episode.frames)
        if result.response is not None:
            prompt = shown_prompt(trajectory) if index in sampled else None
            prompt = result.response.prompt.without_images() if prompt is None else reduced(prompt)
            result = replace(result, response=replace(result.response, prompt=prompt))
        yield index, result, trajectory


def without_images(trajectory: Trajectory) -> Trajectory:
    """The episode without what was seen and read, which takes most of its memory."""
    last = trajectory.final_observation.without_images()
    return replace(trajectory.without_images().without_inputs(), final_observation=last)


def recorded_tasks(num_tasks: int, num_videos: int) -> frozenset[int]:
    """Indices of the tasks whose video is recorded, evenly distributed over the list."""
    return frozenset(evenly_chosen(num_tasks, num_videos))


class EvalLedger:
    """Keeps the episodes of an evaluation as they end, on disk if a folder is named.

    Use it as a context manager: however the block ends, results.json says what has been measured until then.
    """

    def __init__(
        self,
        settings: EvalSettings,
        tasks: Sequence[Task],
        videos: Videos,
        folder: Path | None,
        saving: Saving = Saving(),  # noqa: B008 - frozen
    ) -> None:
        self.ended: dict[str, EpisodeResult] = {}  # by id
        self._settings = settings
        self._tasks = tasks
        self._videos = videos
        self._folder = folder
        self._directory: EvalDirectory | None = None
        self._recorder: EpisodeRecorder | None = None
        self._saving = saving
        self._saver: EvaluatedEpisodes | None = None
        self._saved = frozenset(tasks[:: saving.every])
        self._samples: SampleRecorder | None = None
        self._sampled = {tasks[index].episode_id for index in evenly_chosen(len(tasks), PER_EVALUATION)}
        self._stack = ExitStack()

    def __enter__(self) -> EvalLedger:
        if self._folder is not None:
            with ExitStack() as stack:
                self._directory = EvalDirectory.create(self._folder)
                self._directory.write(self.record)
                stack.enter_context(log_to_file(self._directory.log_file))
                self._recorder = stack.enter_context(EpisodeRecorder(self._directory))
                self._samples = stack.enter_context(SampleRecorder(self._directory))
                saving = self._saving
                if saving.kind != "none":
                    saver = EvaluatedEpisodes(self._directory.data, saving.kind, saving.fps, saving.which)
                    self._saver = stack.enter_context(saver)
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is not None:
                log.error("the evaluation stopped", exc_info=error)
            if self._directory is not None:
                self._directory.write(self.record)

    @property
    def num_videos(self) -> int:
        """How many episodes are recorded as videos; whether one failed is known only when it has ended."""
        if self._folder is None:
            return 0
        return self._videos if isinstance(self._videos, int) else len(self._tasks)

    @property
    def num_samples(self) -> int:
        """How many results carry the images of their prompt."""
        return 0 if self._folder is None else PER_EVALUATION

    def saves(self, task: Task) -> bool:
        """Whether an episode may be saved; whether it succeeded is known only when it has ended."""
        return self._saver is not None and task in self._saved

    def episode_ended(self, episode: Episode) -> None:
        """Save an episode whose steps were recorded."""
        if self._saver is not None:
            self._saver.add(episode)

    @property
    def num_saved(self) -> int:
        """How many episodes are in the datasets."""
        return 0 if self._saver is None else self._saver.num_saved

    @property
    def record(self) -> EvalRecord:
        """What has been measured so far, in the order of the tasks."""
        episodes = tuple(self.ended[t.episode_id] for t in self._tasks if t.episode_id in self.ended)
        result = EvalResult(episodes, complete=len(episodes) == len(self._tasks))
        return EvalRecord(self._settings, len(self._tasks), result, self._folder)

    def take(self, result: EpisodeResult) -> EpisodeResult:
        """Write an episode, its video and its response to disk, and return it without its frames."""
        if self._recorder is not None:
            self._recorder.record(0, "eval", [result])
            if result.frames and not (self._videos == "failures" and result.outcome == "success"):
                name = f"{result.task.episode_id}_{result.outcome}"
                self._recorder.write_video(name, result.frames, result.instruction, result.outcome)
        if self._samples is not None and result.task.episode_id in self._sampled:
            self._samples.record(0, "eval", [result])
        kept = replace(result, frames=())
        self.ended[result.task.episode_id] = kept
        return kept


def requested_tasks(request: EvalRequest, spec: SuiteSpec) -> list[Task]:
    """The episodes of a request."""
    task = request.replay
    if task is None:
        return [
            task
            for each in request.suites
            for task in tasks_from_states(spec.of(each.env.suite), each.env.task_ids, each.init_states, each.seed)
        ]
    chosen_task_ids(spec, [task.task_id])
    states = {*spec.train_states, *spec.eval_states, *spec.benchmark_states}
    if task.init_state not in states:
        known = f"its states are {min(states)} to {max(states)}"
        raise UsageError(f"{task.episode_id}: {spec.name} has no initial state {task.init_state}; {known}.")
    return [task]


def _pool_size(request: EvalRequest) -> int:
    """Environments side by side: no more than there are episodes, since a simulator takes seconds to start."""
    counts = [num_configured_tasks(each.env, each.gym) or 0 for each in request.suites]
    planned = [count * len(each.init_states) for count, each in zip(counts, request.suites, strict=True)]
    episodes = 1 if request.replay else sum(planned)
    reader_mib = READER_MIB if request.distributed.backend == "ray" else 0
    size = min(configured_num_envs(request.env, request.gym, reader_mib), episodes)
    if request.env.num_envs is not None and request.distributed.address is None:  # otherwise memory is elsewhere
        check_memory_for_envs(request.env.suite, size, reader_mib=reader_mib)
    return size


def united_env(request: EvalRequest) -> EnvConfig:
    """The environments of all suites of a request."""
    if not request.also:
        return request.env
    tasks = {each.env.suite: each.env.task_ids for each in request.suites if each.env.task_ids is not None}
    names = tuple(each.env.suite for each in request.suites)
    return request.env.model_copy(update={"suites": names, "task_ids": None, "suite_tasks": tasks})


def settings_of(request: EvalRequest, env: EnvConfig, spec: SuiteSpec, tasks: Sequence[Task]) -> EvalSettings:
    """The settings of an evaluation in the environments `env`, of one suite or of several."""
    parts = {}
    for each in request.suites:
        suite = spec.of(each.env.suite)
        one, own = replace(each, env=env), [task for task in tasks if task.suite == suite.name]
        parts[suite.name] = _settings(one, suite, own)
        if each.by_protocol:
            by_protocol: dict[str, EvalSettings] = {
                name: _settings(one, suite, [task for task in own if task.init_state in states])
                for name, states in each.by_protocol.items()
            }
            parts[suite.name] = of_both_protocols(parts[suite.name], by_protocol)
    first, *others = parts.values()
    return first if not others else united_settings(parts)


def _settings(request: EvalRequest, spec: SuiteSpec, tasks: Sequence[Task]) -> EvalSettings:
    states = sorted({task.init_state for task in tasks})
    episodes = [(task.task_id, task.init_state) for task in tasks]
    training, gym_env = request.training, request.gym.env
    trained = {
        state for task, state in episodes if training is not None and state in training.states(spec.name, gym_env, task)
    }
    warnings = state_warnings(training, spec.name, gym_env, episodes)
    is_known = bool(trained) or not warnings  # a checkpoint may know only some of its training
    return EvalSettings(
        checkpoint=request.checkpoint,
        fingerprint=fingerprint(checkpoint_folder(request.checkpoint)),
        suite=spec.name,
        protocol=request.env.protocol,
        task_ids=tuple(sorted({task.task_id for task in tasks})),
        states_per_task=len(states),
        max_steps=request.env.max_steps or max(task.max_steps for task in spec.tasks),
        num_trained_states=len(trained) if is_known else None,
        temperature=request.temperature,
        seed=request.seed,
        replay_of=None if request.replay is None else request.replay.episode_id,
        env=request.env.model_dump(mode="json"),
        gym=request.gym.model_dump(mode="json") if spec.name == GYM else {},
        prompts=request.prompts.model_dump(mode="json") if spec.name == PROMPTS else {},
        rollout=request.rollout.model_dump(mode="json") if is_prompts(spec.name) else {},
        policy=request.policy.model_dump(mode="json", exclude={"path"}),
        vlarl=__version__,
        machine=describe_machine(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        init_states=tuple(states),
        training_data_from=None if training is None else training.read_from,
        warnings=warnings,
    )


SAMPLES, SAMPLE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's files: their names and sizes, and samples from all over each, whatever their size."""
    digest = hashlib.sha256()
    kinds = ("*.safetensors", "*.pt", "config.json", "adapter_config.json")
    found = (path for kind in kinds for path in folder.glob(kind) if path.name != "trainer.safetensors")
    for path in sorted(path for path in found if path.is_file()):
        size = path.stat().st_size
        starts = {sample * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1) for sample in range(SAMPLES)}
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in sorted(starts):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
