"""The nouns of vlarl: what crosses the borders between its parts, in the order one observation meets them.

    Task -> Observation -> PolicyInput -> ActionTokens -> ChunkOutcome -> Transition -> Trajectory
         -> Rollout -> TrainBatch -> UpdateResult -> (weights) -> Task

Shapes are given in comments: B rows of a batch, K actions of a chunk, D dimensions of an action, L prompt tokens,
I images of an observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

UInt8Array = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

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
    iteration: int = 0  # that the task was sampled for; 0 in an evaluation

    @property
    def episode_id(self) -> str:
        """A name for the episode that says what it takes to replay it."""
        return f"{self.suite}-t{self.task_id:02d}-s{self.init_state:03d}-{self.seed:016x}"


@dataclass(frozen=True)
class Observation:
    """What the robot sees and feels at a decision; simulator conventions have ended here."""

    images: UInt8Array  # [I, H, W, 3] upright RGB, the agent view first
    proprio: FloatArray  # [8] end-effector position 3, axis-angle 3, gripper fingers 2
    instruction: str


@dataclass(frozen=True)
class PolicyInput:
    """A batch of observations as the policy reads them. Right-padded prompts; pixels stay uint8 until the device."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] bool
    pixels: torch.Tensor  # [B, I, 3, H, W] uint8, at the model's resolution
    proprio: torch.Tensor | None  # [B, P] float32, normalised; None for policies without the proprio token
    known_ragged: bool | None = None  # what `ragged` answers, where it was found out already

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def ragged(self) -> bool:
        """Whether prompts differ in length. Found out on the host, a device need not be waited for."""
        return not bool(self.attention_mask.all()) if self.known_ragged is None else self.known_ragged

    def to(self, device: torch.device | str) -> PolicyInput:
        """The same batch on another device."""
        return PolicyInput(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.pixels.to(device, non_blocking=True),
            None if self.proprio is None else self.proprio.to(device, non_blocking=True),
            self.ragged,
        )

    def pinned(self) -> PolicyInput:
        """The same batch in page-locked memory of the host."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            attention_mask=self.attention_mask.pin_memory(),
            pixels=self.pixels.pin_memory(),
            proprio=None if self.proprio is None else self.proprio.pin_memory(),
        )

    def rows(self, index: torch.Tensor | slice) -> PolicyInput:
        """The chosen rows, with prompt columns that none of them uses cut off."""
        mask = self.attention_mask[index]
        width = int(mask.sum(dim=1).max()) if mask.shape[0] else mask.shape[1]
        proprio = None if self.proprio is None else self.proprio[index]
        return PolicyInput(self.input_ids[index][:, :width], mask[:, :width], self.pixels[index], proprio)


@dataclass(frozen=True)
class ActionTokens:
    """What an engine sampled for a batch, and how likely it found it."""

    ids: torch.Tensor  # [B, K*D] int64 vocabulary ids, all of them action ids
    engine_logprobs: torch.Tensor  # [B, K*D] float32, over the action ids at the sampling temperature
    version: int  # version of the weights that sampled
    actions: torch.Tensor | None = None  # [B, K, D] normalised, of a regression head; None: what the ids decode to


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


@dataclass(frozen=True)
class Transition:
    """One decision of the policy and what came of it."""

    observation: Observation
    token_ids: IntArray  # [K*D]
    engine_logprobs: FloatArray  # [K*D]
    rewards: FloatArray  # [K] environment rewards, zero past `num_executed`
    num_executed: int  # steps of the chunk that ran before the episode ended
    ref_logprobs: FloatArray | None = None  # [K*D] the reference's, once the learner has computed them
    learner_logprobs: FloatArray | None = None  # [K*D] the learner's own, computed with them for a KL in the reward
    version: int = 0  # of the weights that decided


@dataclass(frozen=True)
class Trajectory:
    """One episode."""

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

    @property
    def length(self) -> int:
        """Environment steps executed."""
        return sum(t.num_executed for t in self.transitions)

    @property
    def env_return(self) -> float:
        """Undiscounted sum of the environment's rewards."""
        return float(sum(float(t.rewards.sum()) for t in self.transitions))

    @property
    def group(self) -> tuple[int, int]:
        """The key of its group: episodes of one task from one initial state, which methods compare with each other."""
        return self.task.iteration, self.task.group

    def with_rewards(self, rewards: Sequence[FloatArray]) -> Trajectory:
        """The same episode scored differently: one array [K] for each transition."""
        scored = tuple(replace(t, rewards=r) for t, r in zip(self.transitions, rewards, strict=True))
        return replace(self, transitions=scored)


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
    trajectories: tuple[Trajectory, ...]
    kept: tuple[Trajectory, ...]  # those that are trained on; members of a group follow each other
    metrics: dict[str, float]
    sampler_state: dict[str, Any]  # what the next iteration's tasks depend on
    curriculum: dict[str, Any]  # the same for people
    seconds: dict[str, float]  # what took how long


@dataclass(frozen=True)
class TrainBatch:
    """Decisions ready for the learner, one row each; rows of one trajectory stay in order."""

    inputs: PolicyInput
    token_ids: torch.Tensor  # [N, K*D] int64 vocabulary ids
    places: torch.Tensor  # [N, K*D] int64 places of these ids in the action support
    old_logprobs: torch.Tensor  # [N, K*D] log-probs of the policy that acted
    advantages: torch.Tensor  # [N, K*D]
    mask: torch.Tensor  # [N, K*D] bool: tokens of executed steps
    trajectory: torch.Tensor  # [N] int64 which trajectory of the batch a row belongs to
    returns: torch.Tensor | None = None  # [N, V] value targets; None without a critic
    old_values: torch.Tensor | None = None  # [N, V] values at rollout time; None without a critic
    weights: torch.Tensor | None = None  # [N, K*D] what each token counts in its minibatch; None until one is cut
    ref_logprobs: torch.Tensor | None = None  # [N, K*D] log-probs of the reference policy; None without one
    sequence_log_ratio: torch.Tensor | None = None  # [N] mean over the row's trajectory; None unless it is asked for
    selected: torch.Tensor | None = None  # [N, K*D] bool: tokens that the policy gradient is taken of; None for all

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def value_mask(self) -> torch.Tensor:
        """[N, V] bool: values of executed steps; those of steps that never ran are not targets."""
        num_values = 1 if self.returns is None else self.returns.shape[1]
        return self.mask[:, :: self.mask.shape[1] // num_values]

    def rows(self, index: torch.Tensor) -> TrainBatch:
        """The chosen decisions."""
        return self._each(self.inputs.rows(index), lambda column: column[index])

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device; what is pinned is copied while the host continues."""
        return self._each(self.inputs.to(device), lambda column: column.to(device, non_blocking=True))

    def pinned(self) -> TrainBatch:
        """The same batch in page-locked memory of the host, which a GPU reads by itself."""
        return self._each(self.inputs.pinned(), lambda column: column.pin_memory())

    def _each(self, inputs: PolicyInput, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "inputs"}
        changed = {name: change(column) for name, column in columns.items() if column is not None}
        return replace(self, inputs=inputs, **changed)


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

    @classmethod
    def of(cls, trajectory: Trajectory, instruction: str, frames: tuple[UInt8Array, ...] = ()) -> EpisodeResult:
        """What a trajectory came to."""
        return cls(
            task=trajectory.task,
            instruction=instruction,
            success=trajectory.success,
            length=trajectory.length,
            episode_return=trajectory.env_return,
            frames=frames,
            status=trajectory.status,
            num_retries=trajectory.num_retries,
            reward_error=trajectory.reward_error,
        )

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

    def by_task(self) -> dict[int, EvalResult]:
        """task_id -> its episodes."""
        ids = sorted({e.task.task_id for e in self.episodes})
        return {i: replace(self, episodes=tuple(e for e in self.episodes if e.task.task_id == i)) for i in ids}

    def per_task(self) -> dict[int, tuple[int, int]]:
        """task_id -> (successes, episodes that did not crash)."""
        return {task_id: (part.won, len(part.counted)) for task_id, part in self.by_task().items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
