"""Two tiny policies of the kinds of decision that OpenVLA does not sample, each with a problem whose answer is known.

    TextPolicy    tokens up to a stop token, so decisions differ in length; it has to write the word of its prompt
    ChainPolicy   a denoising chain of which one step is stochastic, so elements are Gaussian; it has to reach a point

Both are tables of parameters: what a policy says of one prompt or point is independent of all others.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.envs.base import NOTHING, Actions, LockstepPool, Record, SuiteSpec, TaskSpec
from vlarl.policies.base import Evaluation, Level, Policy
from vlarl.policies.distribution import greedy, sample, token_entropy, token_logprobs
from vlarl.types import Action, ChunkOutcome, Observation, Task, UInt8Array


@dataclass(frozen=True)
class TaskInputs(TensorRows):
    """What both policies read: the index of the task."""

    task: torch.Tensor  # [B] int64


class TablePolicy(Policy):
    """What the two have in common: inputs, a value for each task and element, saving."""

    num_tasks: int
    num_values: int

    def __init__(self) -> None:
        super().__init__()
        self.value_head: nn.Module | None = None
        self.level: Level = "chunk"

    @property
    def image_size(self) -> int:
        return 1

    @property
    def num_images(self) -> int:
        return 1

    def process(self, observations: Sequence[Observation]) -> TaskInputs:
        return TaskInputs(torch.tensor([int(o.proprio[0]) for o in observations]))

    def use_statistics(self, unnorm_key: str | None, *suites: str) -> None:
        pass

    def prepare_training(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        pass

    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        pass

    def attach_value_head(self, hidden_sizes: Sequence[int], seed: int, level: Level = "chunk") -> nn.Module:
        self.level = level
        self.value_head = nn.Embedding(self.num_tasks, self.num_values)
        nn.init.zeros_(self.value_head.weight)
        return self.value_head

    def detach_value_head(self) -> None:
        self.value_head = None

    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        assert isinstance(inputs, TaskInputs) and self.value_head is not None
        values: torch.Tensor = self.value_head(inputs.task)
        width = {"chunk": 1, "step": self.num_steps, "token": self.num_values}[self.level]
        if self.level == "token" and decisions is not None:
            width = decisions.mask.shape[1]
        return values[:, :width]

    @abstractmethod
    def likelihood(
        self, inputs: TaskInputs, decisions: Decisions, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [B, L]."""

    def evaluate(
        self,
        inputs: TensorRows,
        decisions: Decisions,
        temperature: float,
        *,
        critic_only: bool = False,
        entropy_gradient: bool = False,
        extras: Collection[str] = (),
    ) -> Evaluation:
        assert isinstance(inputs, TaskInputs) and not extras
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_only):
            logprobs, entropy = self.likelihood(inputs, decisions, temperature)
        values = None if self.value_head is None else self.values(inputs, decisions)
        return Evaluation(logprobs, entropy if entropy_gradient else entropy.detach(), values)

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"kind": type(self).__name__}))
        save_file({name: p.detach().contiguous() for name, p in self.named_parameters()}, folder / "model.safetensors")


# Text

WORDS = ("ab", "b", "ca")  # of the prompts; the policy writes letters up to the stop token
LETTERS = " abc"  # the first one is the stop token
STOP = 0
MAX_TOKENS = 4


@dataclass(frozen=True)
class TextSample(TensorRows):
    """Token ids, the stop token included; 0 in the padding, too."""

    ids: torch.Tensor  # [B, L] int64


class TextPolicy(TablePolicy):
    """Logits by prompt, position and the token before."""

    num_tasks, num_values, num_steps, action_dim = len(WORDS), MAX_TOKENS, 1, 0
    sampling_options = frozenset({"temperature", "max_tokens"})

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        shape = (len(WORDS), MAX_TOKENS, len(LETTERS), len(LETTERS))
        self.logits = nn.Parameter(0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)))

    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        rows = [np.random.default_rng(seed).random(MAX_TOKENS, dtype=np.float32) for seed in seeds]
        return torch.from_numpy(np.stack(rows))

    @torch.no_grad()
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        assert isinstance(inputs, TaskInputs)
        task, temperature = inputs.task, sampling.temperature
        before = torch.full_like(task, STOP)
        alive = torch.ones_like(task, dtype=torch.bool)
        ids, masks = [], []
        for position in range(sampling.max_tokens or MAX_TOKENS):
            logits = self.logits[task, position, before].unsqueeze(1)
            uniforms = noise[:, position : position + 1]
            chosen = (greedy(logits) if temperature == 0 else sample(logits, temperature, uniforms))[:, 0]
            before = torch.where(alive, chosen, STOP)
            ids.append(before)
            masks.append(alive)
            alive = alive & (before != STOP)
            if not alive.any():
                break
        taken, mask = torch.stack(ids, dim=1), torch.stack(masks, dim=1)
        decisions = Decisions(
            sample=TextSample(taken),
            engine_logprobs=torch.zeros(taken.shape),
            mask=mask,
            step=torch.zeros_like(taken),
            version=torch.zeros_like(task),
        )
        logprobs, _ = self.likelihood(inputs, decisions, temperature or 1.0)
        return Decisions(decisions.sample, torch.where(mask, logprobs, 0.0), mask, decisions.step, decisions.version)

    def likelihood(
        self, inputs: TaskInputs, decisions: Decisions, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(decisions.sample, TextSample)
        ids = decisions.sample.ids
        before = torch.cat([torch.full_like(ids[:, :1], STOP), ids[:, :-1]], dim=1)
        logits = self.logits[inputs.task[:, None], torch.arange(ids.shape[1])[None], before]
        return token_logprobs(logits, ids, temperature), token_entropy(logits, temperature)

    def act(self, decisions: Decisions) -> list[Action]:
        assert isinstance(decisions.sample, TextSample)
        rows = zip(decisions.sample.ids.tolist(), decisions.mask.tolist(), strict=True)
        return [
            "".join(LETTERS[i] for i, kept in zip(ids, mask, strict=True) if kept and i != STOP) for ids, mask in rows
        ]


class FakePool(LockstepPool):
    """Slots that show which task they run, in `proprio`."""

    num_envs = 4

    def __init__(self, spec: SuiteSpec) -> None:
        super().__init__()
        self.spec = spec
        self._tasks: dict[int, Task] = {}
        self._steps: dict[int, int] = {}

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Observation]:
        for slot, task in zip(slots, tasks, strict=True):
            self._tasks[slot], self._steps[slot] = task, 0
        return [self._observe(slot) for slot in slots]

    def _observe(self, slot: int) -> Observation:
        task = self._tasks[slot].task_id
        return Observation(np.zeros((1, 1, 1, 3), np.uint8), np.float32([task]), self.spec.tasks[task].instruction)

    def frame(self, slot: int) -> UInt8Array:
        return np.zeros((16, 16, 3), np.uint8)

    def close(self) -> None:
        pass


def spec_of(name: str, instructions: Sequence[str], max_steps: int) -> SuiteSpec:
    tasks = tuple(TaskSpec(i, instruction, max_steps) for i, instruction in enumerate(instructions))
    return SuiteSpec(name, tasks, (0,), (1,), (0, 1), action_dim=DIMENSIONS, proprio_dim=1)


class WordPool(FakePool):
    """Each prompt wants one word: an episode is one text, and succeeds where it is that word."""

    def __init__(self) -> None:
        super().__init__(spec_of("words", [f"write {word}" for word in WORDS], 1))

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        outcomes = []
        for slot, text in zip(slots, actions, strict=True):
            assert isinstance(text, str)
            won = text == WORDS[self._tasks[slot].task_id]
            outcomes.append(ChunkOutcome(np.float32([won]), 1, True, False, won, self._observe(slot)))
        return outcomes


# A chain

STEPS, DIMENSIONS, NUM_POINTS = 2, 2, 2
CHAIN_STEPS = 3  # of which the second one is stochastic
STD = 0.3
MAX_ENV_STEPS = 3  # an episode is a whole chunk and the first step of another
POINTS = np.float32([[[0.5, -0.5], [-1.0, 0.25]], [[-0.75, 0.0], [1.0, 1.0]]])  # [task, K, D]


@dataclass(frozen=True)
class ChainSample(TensorRows):
    """The chain before and after its stochastic step."""

    before: torch.Tensor  # [B, K, D]
    after: torch.Tensor  # [B, K, D]


class ChainPolicy(TablePolicy):
    """A chain from noise to actions: each step moves halfway to the target of its task; one adds Gaussian noise."""

    num_tasks, num_values, num_steps, action_dim = NUM_POINTS, STEPS * DIMENSIONS, STEPS, DIMENSIONS

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Parameter(torch.zeros(NUM_POINTS, STEPS, DIMENSIONS))

    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[B, 2, K, D]: where the chain begins, and what its stochastic step adds."""
        shape = (2, STEPS, DIMENSIONS)
        return torch.from_numpy(
            np.stack([np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) for seed in seeds])
        )

    def _moved(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * (self.target[task] - x)

    @torch.no_grad()
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        assert isinstance(inputs, TaskInputs)
        before = self._moved(0.1 * noise[:, 0], inputs.task)
        after = self._moved(before, inputs.task) + STD * sampling.temperature * noise[:, 1]
        rows, count = len(inputs), STEPS * DIMENSIONS
        decisions = Decisions(
            sample=ChainSample(before, after),
            engine_logprobs=torch.zeros(rows, count),
            mask=torch.ones(rows, count, dtype=torch.bool),
            step=(torch.arange(count) // DIMENSIONS).expand(rows, -1),
            version=torch.zeros(rows, dtype=torch.int64),
        )
        logprobs, _ = self.likelihood(inputs, decisions, sampling.temperature or 1.0)
        return Decisions(decisions.sample, logprobs, decisions.mask, decisions.step, decisions.version)

    def likelihood(
        self, inputs: TaskInputs, decisions: Decisions, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chain = decisions.sample
        assert isinstance(chain, ChainSample)
        std = STD * temperature
        gap = (chain.after - self._moved(chain.before, inputs.task)) / std
        logprobs = -0.5 * gap**2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        entropy = torch.full_like(logprobs, 0.5 * math.log(2 * math.pi * math.e * std**2))
        return logprobs.flatten(1), entropy.flatten(1)

    def act(self, decisions: Decisions) -> list[Action]:
        """What the rest of the chain makes of it: here, the state after the stochastic step."""
        assert isinstance(decisions.sample, ChainSample)
        return list(decisions.sample.after.numpy())


class PointPool(FakePool):
    """Each task wants a point at every step: the nearer, the larger the reward. The time limit ends the episode."""

    def __init__(self) -> None:
        super().__init__(spec_of("points", ["first", "second"], MAX_ENV_STEPS))

    def step_chunk(self, slots: Sequence[int], actions: Actions, record: Record = NOTHING) -> list[ChunkOutcome]:
        outcomes = []
        for slot, chunk in zip(slots, actions, strict=True):
            assert isinstance(chunk, np.ndarray) and chunk.shape == (STEPS, DIMENSIONS)
            executed = min(STEPS, MAX_ENV_STEPS - self._steps[slot])
            self._steps[slot] += executed
            gap = np.abs(chunk - POINTS[self._tasks[slot].task_id]).max(axis=1)
            rewards = np.where(np.arange(STEPS) < executed, np.exp(-(gap**2)), 0.0).astype(np.float32)
            ended = self._steps[slot] == MAX_ENV_STEPS
            near = bool(ended and (gap[:executed] < 0.25).all())
            outcomes.append(ChunkOutcome(rewards, executed, False, ended, near, self._observe(slot)))
        return outcomes
