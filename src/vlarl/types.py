"""The nouns of vlarl: what crosses the borders between its parts, in the order one observation meets them.

    Task -> Observation -> (inputs of the policy) -> Decisions -> ChunkOutcome -> Transition -> Trajectory
         -> Rollout -> TrainBatch -> UpdateResult -> (weights) -> Task

What a policy reads and samples is in decisions.py, what the learner is given as well. Shapes are given in
comments: K environment steps of a decision, D dimensions of an action, L elements of a decision, V values of the critic
for a decision, I images of an observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vlarl.decisions import Decisions, Row, TensorRows

UInt8Array = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

Action = FloatArray | str
"""What a decision becomes for the environment: a chunk of actions [K, D] in the robot's units, or a text."""

TaskKey = tuple[str, int]
"""A task by the name of its suite and its index there."""

EpisodeStatus = Literal["ok", "crashed", "reward_failed"]  # crashed: by its simulator, not by its policy


@dataclass(frozen=True)
class Task:
    """One episode to run. Everything random about it follows from these fields, so it can be run again."""

    suite: str
    task_id: int
    init_state: int  # index of the initial state within the task
    seed: int  # drives the environment's and the action sampler's randomness
    group: int = 0  # index within the iteration; episodes of one group share task and initial state
    member: int = 0  # index within the group
    group_size: int = 1  # episodes of the group
    iteration: int = 0  # that the task was sampled for, or batch of an asynchronous run; 0 in an evaluation

    @property
    def key(self) -> TaskKey:
        """Which task it is an episode of."""
        return self.suite, self.task_id

    @property
    def episode_id(self) -> str:
        """A name for the episode that says what it takes to replay it."""
        return f"{self.suite}-t{self.task_id:02d}-s{self.init_state:03d}-{self.seed:016x}"


@dataclass(frozen=True)
class Prompt:
    """What a vision-language model is to respond to, and what is known about the right response.

    >>> prompt = Prompt(
    ...     messages=({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},),
    ...     images=(np.zeros((56, 56, 3), np.uint8),),
    ...     columns={"solution": "black"},
    ... )
    >>> prompt.text
    'Which colour?'
    """

    messages: tuple[Mapping[str, Any], ...]  # role and content: a text, or parts of type text, image and video
    images: tuple[UInt8Array, ...] = ()  # [H, W, 3] each, in the order of the parts of type image
    videos: tuple[UInt8Array, ...] = ()  # [T, H, W, 3] each, in the order of the parts of type video
    video_fps: tuple[float | None, ...] = ()  # frames a second of each video, as they are here; None: not known
    columns: Mapping[str, Any] = field(default_factory=dict)  # the other columns of its row, for rewards
    conversational: bool = True  # False: the row has a plain text, and rewards get plain texts as well

    @property
    def conversation(self) -> str:
        """The text of a prompt of one message; otherwise all messages, each after its role."""
        if len(self.messages) == 1:
            return message_text(self.messages[0])
        return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in self.messages)

    @property
    def text(self) -> str:
        """The text of the last message of the user, or of the last message where there is none."""
        users = [message for message in self.messages if message["role"] == "user"]
        return message_text((users or list(self.messages))[-1])

    def without_images(self) -> Prompt:
        """The same prompt without its pixels."""
        return replace(self, images=(), videos=(), video_fps=())


def pixel_digest(images: UInt8Array) -> bytes:
    """What tells images from others."""
    return blake2b(images.tobytes(), digest_size=16).digest()


def message_text(message: Mapping[str, Any]) -> str:
    """The text parts of a message, one line each."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


@dataclass(frozen=True)
class Observation:
    """What the robot sees and feels at a decision, or the prompt that a language model responds to; simulator
    conventions have ended here."""

    images: UInt8Array  # [I, H, W, 3] upright RGB, the agent view first
    proprio: FloatArray  # [8] end-effector position 3, axis-angle 3, gripper fingers 2
    instruction: str
    prompt: Prompt | None = None  # None: of a robot
    inputs: Row[TensorRows] | None = None  # as the policy reads it, where that was processed beside the environment
    fetch: Callable[[], Observation] | None = None  # returns it with its pixels; None: they are here, or left out
    digest: bytes = b""  # `pixel_digest` of the images, where they are elsewhere and must be told from others

    def whole(self) -> Observation:
        """The same observation with its pixels, from wherever they are."""
        return self if self.fetch is None else self.fetch()

    @classmethod
    def of_prompt(cls, prompt: Prompt) -> Observation:
        """What an environment of prompts shows: the prompt and nothing else."""
        return cls(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(8, np.float32), prompt.text, prompt)

    def without_images(self) -> Observation:
        """The same observation without its pixels."""
        prompt = None if self.prompt is None else self.prompt.without_images()
        return replace(self, images=self.images[:0].copy(), prompt=prompt, fetch=None)


@dataclass(frozen=True)
class ChunkOutcome:
    """What one environment made of one chunk of actions, which stops at the first end of the episode."""

    rewards: FloatArray  # [K], zero for steps that were not executed
    num_executed: int
    terminated: bool  # the task ended here (success): nothing follows, so nothing to bootstrap
    truncated: bool  # the time limit ended it: the value of `observation` stands for the rest
    success: bool
    observation: Observation  # after the last executed step
    frames: tuple[UInt8Array, ...] = ()  # one a step, when a video of the episode is recorded
    error: str | None = None  # the simulator failed here: the episode is counted as crashed and never trained on
    passed: tuple[Observation, ...] = ()  # after each step but the last, when its steps are recorded


@dataclass(frozen=True)
class Response:
    """The text that a policy wrote in response to a prompt.

    >>> prompt = Prompt(({"role": "user", "content": "What is 3 plus 4?"},), columns={"solution": "7"})
    >>> Response(prompt, "It is 7", num_tokens=4, cut_off=False).prompt.text
    'What is 3 plus 4?'
    """

    prompt: Prompt
    text: str
    num_tokens: int  # its stop token included
    cut_off: bool  # it reached the limit of tokens: it has no stop token


@dataclass(frozen=True)
class Transition:
    """One decision of the policy and its outcome."""

    observation: Observation
    inputs: Row[TensorRows] | None  # the observation as the policy reads it; None: left out
    decided: Row[Decisions]
    rewards: FloatArray  # [K] environment rewards, zero past `num_executed`
    num_executed: int  # environment steps that ran before the episode ended
    text: str | None = None  # that the decision became; None: it became actions

    @property
    def decision(self) -> Decisions:
        """The decision as a batch of one row."""
        return self.decided.alone()

    @property
    def version(self) -> int:
        """Version of the weights that decided."""
        return int(self.decided.batch.version[self.decided.index])

    @property
    def response(self) -> Response | None:
        """The text with the prompt that it responds to; None: the decision became actions."""
        prompt = self.observation.prompt
        if self.text is None or prompt is None:
            return None
        return Response(prompt, self.text, len(self.decision.token_ids()[0]), self.decision.cut_off()[0])


@dataclass(frozen=True)
class Earlier:
    """What an episode came to before a segment of it.

    >>> Earlier(num_steps=64, progress=0.25, reward=0.25).num_steps  # one segment of 64 steps came before
    64
    """

    num_steps: int = 0
    progress: float = 0.0  # sum of the environment's own rewards
    reward: float = 0.0  # sum of the rewards that were assigned to its steps
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # combined rewards: the same by each


@dataclass(frozen=True)
class Trajectory:
    """One episode, or a segment of one: with `rollout.num_steps` an iteration ends before its episodes do."""

    task: Task
    transitions: tuple[Transition, ...]
    final_observation: Observation
    terminated: bool
    truncated: bool
    success: bool
    policy_version: int  # of the weights that decided last
    status: EpisodeStatus = "ok"  # only what is ok is trained on
    reward_error: str | None = None  # why it could not be scored; its rewards are zero then
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # combined rewards: return by each, without weights
    num_retries: int = 0  # how often it had to be run again because its simulator died or hung
    continues: bool = False  # a segment that its episode does not end with: `final_observation` stands for the rest
    earlier: Earlier = Earlier()  # the segments of the episode before this one

    @property
    def length(self) -> int:
        """Environment steps executed."""
        return sum(t.num_executed for t in self.transitions)

    @property
    def env_return(self) -> float:
        """Undiscounted sum of the environment's rewards."""
        return float(sum(float(t.rewards.sum()) for t in self.transitions))

    @property
    def episode_length(self) -> int:
        """Environment steps of the whole episode, up to the end of this segment."""
        return self.earlier.num_steps + self.length

    @property
    def episode_return(self) -> float:
        """Return of the whole episode, up to the end of this segment."""
        return self.earlier.reward + self.env_return

    @property
    def episode_parts(self) -> dict[str, float]:
        """Combined rewards: the same by each."""
        return added(self.earlier.reward_parts, self.reward_parts)

    @property
    def response(self) -> Response | None:
        """The last text that it wrote; None: it is of a robot, or it crashed before its first decision."""
        return self.transitions[-1].response if self.transitions else None

    @property
    def group(self) -> tuple[int, int]:
        """The key of its group: episodes of one task from one initial state, which methods compare with each other."""
        return self.task.iteration, self.task.group

    def without_inputs(self) -> Trajectory:
        """The same episode for readers of observations: what the policy read is left out."""
        last = replace(self.final_observation, inputs=None)
        return replace(
            self, transitions=tuple(replace(t, inputs=None) for t in self.transitions), final_observation=last
        )

    def without_images(self) -> Trajectory:
        """The same episode for the learner: images are left out, unless the policy has yet to read the last one."""
        blank = tuple(replace(t, observation=t.observation.without_images()) for t in self.transitions)
        last = self.final_observation
        if last.inputs is not None:
            last = last.without_images()
        elif self.terminated:  # nothing reads it: it must not keep images in an object store
            last = replace(last, fetch=None)
        return replace(self, transitions=blank, final_observation=last)

    def whole(self) -> Trajectory:
        """The same episode with its images, from wherever they are."""
        seen = tuple(replace(t, observation=t.observation.whole()) for t in self.transitions)
        return replace(self, transitions=seen, final_observation=self.final_observation.whole())

    def with_rewards(self, rewards: Sequence[FloatArray]) -> Trajectory:
        """The same episode scored differently: one array [K] for each transition."""
        scored = tuple(replace(t, rewards=r) for t, r in zip(self.transitions, rewards, strict=True))
        return replace(self, transitions=scored)


def added(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    """The sums of the values by name."""
    return {name: one.get(name, 0.0) + two.get(name, 0.0) for name in {**one, **two}}


def group_members(trajectories: Sequence[Trajectory]) -> list[IntArray]:
    """The indices of the members of each group, groups in the order of their first member."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group, []).append(index)
    return [np.array(indices) for indices in members.values()]


@dataclass(frozen=True)
class Rollout:
    """An iteration's experience, and what is to be written down about it."""

    iteration: int
    trajectories: tuple[Trajectory, ...]  # the episodes that ended in it, each by its last segment
    kept: tuple[Trajectory, ...]  # those that are trained on; members of a group follow each other
    metrics: dict[str, float]
    sampler_state: dict[str, Any]  # what the next iteration's tasks depend on
    curriculum: dict[str, Any]  # the same for people
    seconds: dict[str, float]  # what took how long
    env_steps: int  # that were executed in it
    open_episodes: dict[str, Any] = field(default_factory=dict)  # that continue in the next iteration, or begin in it


@dataclass(frozen=True)
class UpdateResult:
    """What one call of the learner did."""

    metrics: dict[str, float]  # names without the `train/` prefix
    num_samples: int  # decisions that went through a backward pass, once for each epoch
    num_optimizer_steps: int
    num_skipped_steps: int = 0  # refused because loss or gradient was not finite
    stopped_early: bool = False  # by the KL limit


@dataclass(frozen=True)
class EpisodeResult:
    """One evaluated episode."""

    task: Task
    instruction: str
    success: bool
    length: int
    episode_return: float
    frames: tuple[UInt8Array, ...] = field(default=(), repr=False, compare=False)
    status: EpisodeStatus = "ok"  # only what is ok is counted: a simulator that failed says nothing about the policy
    num_retries: int = 0  # how often it had to be run again because its simulator died or hung
    reward_error: str | None = None  # why it could not be scored: it is left out of the mean return then
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # combined rewards: return by each, without weights
    response: Response | None = field(default=None, repr=False, compare=False)  # None: of a robot

    @classmethod
    def of(cls, trajectory: Trajectory, instruction: str, frames: tuple[UInt8Array, ...] = ()) -> EpisodeResult:
        """What a trajectory came to."""
        return cls(
            task=trajectory.task,
            instruction=instruction,
            success=trajectory.success,
            length=trajectory.episode_length,
            episode_return=trajectory.episode_return,
            frames=frames,
            status=trajectory.status,
            num_retries=trajectory.num_retries,
            reward_error=trajectory.reward_error,
            reward_parts=trajectory.episode_parts,
            response=trajectory.response,
        )

    def showing(self, prompt: Prompt | None) -> EpisodeResult:
        """The same result, whose response is to this prompt, with its images; None leaves it as it is."""
        if self.response is None or prompt is None:
            return self
        return replace(self, response=replace(self.response, prompt=prompt))

    @property
    def outcome(self) -> Literal["success", "failure", "crashed"]:
        """How it went, in a word."""
        if self.status == "crashed":
            return "crashed"
        return "success" if self.success else "failure"


@dataclass(frozen=True)
class EvalResult:
    """How a policy did over a set of episodes. Rates and means leave out episodes that crashed."""

    episodes: tuple[EpisodeResult, ...]
    complete: bool = True  # False: stopped before every episode had ended

    @property
    def counted(self) -> tuple[EpisodeResult, ...]:
        """The episodes that did not crash."""
        return tuple(e for e in self.episodes if e.status == "ok")

    @property
    def num_crashed(self) -> int:
        """Episodes that could not be run to their end."""
        return len(self.episodes) - len(self.counted)

    @property
    def num_unscored(self) -> int:
        """Episodes that the reward failed on."""
        return sum(e.reward_error is not None for e in self.counted)

    @property
    def won(self) -> int:
        """Episodes that reached the goal."""
        return sum(e.success for e in self.counted)

    @property
    def success_rate(self) -> float:
        """Fraction of the episodes that reached the goal; NaN where none could be run."""
        return _mean([float(e.success) for e in self.counted])

    @property
    def mean_return(self) -> float:
        """Mean undiscounted return of the episodes that were scored; NaN where there is none."""
        return _mean([e.episode_return for e in self.counted if e.reward_error is None])

    @property
    def mean_length(self) -> float:
        """Mean number of environment steps; NaN where no episode could be run."""
        return _mean([float(e.length) for e in self.counted])

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of the responses; NaN where there is none."""
        return _mean([float(e.response.num_tokens) for e in self.counted if e.response is not None])

    def by_suite(self) -> dict[str, EvalResult]:
        """suite -> its episodes, in the order of the evaluation."""
        suites = dict.fromkeys(e.task.suite for e in self.episodes)
        return {s: replace(self, episodes=tuple(e for e in self.episodes if e.task.suite == s)) for s in suites}

    def by_task(self) -> dict[int, EvalResult]:
        """task_id -> its episodes, of an evaluation of one suite; `by_suite` has each of several."""
        ids = sorted({e.task.task_id for e in self.episodes})
        return {i: replace(self, episodes=tuple(e for e in self.episodes if e.task.task_id == i)) for i in ids}

    def per_task(self) -> dict[int, tuple[int, int]]:
        """task_id -> (successes, episodes that did not crash), of an evaluation of one suite."""
        return {task_id: (part.won, len(part.counted)) for task_id, part in self.by_task().items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
