"""Supervised training knows no family: a flow policy is trained by its own loss, on batches of the same class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fakes.kinds import DIMENSIONS, NUM_POINTS, ChainPolicy

from vlarl.config.finetune import FinetuneConfig, FinetunePolicyConfig
from vlarl.config.schema import LoraConfig
from vlarl.data.batches import DemoBatches
from vlarl.data.demo_set import DemoSet
from vlarl.data.mixtures import MixtureSampler
from vlarl.decisions import TensorRows
from vlarl.policies.supervised import ImitationErrors, SupervisedPolicy
from vlarl.training.sft import DemoBatch, Imitation, imitate
from vlarl.types import FloatArray, UInt8Array

CPU = torch.device("cpu")
COMMANDS = np.float32([[0.0, -0.5], [0.0, 0.75]])  # [task, D] no motion and a gripper, as past an episode's end


@dataclass(frozen=True)
class PointRows(TensorRows):
    task: torch.Tensor  # [N] int64
    actions: torch.Tensor  # [N, K, D]


class FlowPolicy(ChainPolicy, SupervisedPolicy):
    """Its velocity field leads from any point to the target of the task."""

    proprio_dim = 1
    saw_task_in_pixels = True

    def prepare_supervised(self, settings: FinetunePolicyConfig, lora: LoraConfig, seed: int) -> None:
        pass

    def add_statistics(self, name: str, statistics: Mapping[str, Any]) -> None:
        pass

    def demo_rows(self, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> PointRows:
        task = torch.tensor([("first", "second").index(text) for text in instructions])
        return PointRows(task, torch.from_numpy(actions))

    def demo_frames(self, images: Sequence[UInt8Array] | UInt8Array) -> torch.Tensor:
        return torch.from_numpy(np.stack(list(images)))

    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """Flow matching: at a random time between action (0) and noise (1), the velocity is noise minus action."""
        assert isinstance(rows, PointRows)
        self.saw_task_in_pixels &= torch.equal(frames.flatten(1)[:, 0].long(), rows.task)
        noise = torch.randn_like(rows.actions)
        t = 0.1 + 0.9 * torch.rand(len(rows), 1, 1)
        x = t * noise + (1 - t) * rows.actions
        velocity = (x - self.target[rows.task]) / t
        return ((velocity - (noise - rows.actions)) ** 2).mean()

    def imitation_errors(self, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
        assert isinstance(rows, PointRows)
        return ImitationErrors((self.target[rows.task] - rows.actions).abs().mean(dim=(1, 2)), None)


def demonstrations() -> DemoSet:
    """Three frames of each task, whose pixels hold its index."""
    task = np.repeat(np.arange(NUM_POINTS), 3)
    return DemoSet(
        name="points",
        images=task.astype(np.uint8).reshape(-1, 1, 1, 1, 1).repeat(3, axis=-1),
        proprio=task.astype(np.float32)[:, None],
        actions=COMMANDS[task],
        instruction_ids=task,
        instructions=("first", "second"),
        episode_lengths=np.full(NUM_POINTS, 3),
        success=np.ones(NUM_POINTS, np.bool_),
    )


def trained(seed: int) -> tuple[FlowPolicy, float, float]:
    torch.manual_seed(seed)
    policy = FlowPolicy()
    optim = FinetuneConfig.model_validate(
        {"optim": {"steps": 300, "batch_size": 16, "lr": 2e-2, "warmup_steps": 0, "log_interval": 50}}
    ).optim
    demos = demonstrations()
    batches = DemoBatches([demos], policy, CPU, MixtureSampler([len(demos)], [1.0], seed))
    first, last = imitate(Imitation(policy, optim, batches, CPU), lambda step, row: None)
    return policy, first, last


def test_a_flow_policy_learns_the_demonstrated_actions_of_each_task():
    policy, first, last = trained(0)
    assert policy.saw_task_in_pixels, "frames and rows are of the same decisions"
    expected = torch.from_numpy(COMMANDS)[:, None].expand(-1, policy.num_steps, DIMENSIONS)
    assert (policy.target - expected).abs().max() < 0.02  # of actions up to 0.75; it starts at zero
    assert last < 1e-2 * first


def test_its_random_times_follow_from_the_seed():
    (one, _, last), (two, _, again), (other, _, _) = (trained(seed) for seed in (0, 0, 1))
    assert torch.equal(one.target, two.target) and last == again and not torch.equal(one.target, other.target)


class Recorded:
    """Batches that remember which samples they were."""

    def __init__(self, batches: DemoBatches) -> None:
        self.batches, self.read = batches, []

    def batch(self, first: int, size: int) -> DemoBatch:
        self.read.append((first, size))
        return self.batches.batch(first, size)


def test_batches_follow_each_other():
    demos = demonstrations()
    policy = FlowPolicy()
    optim = FinetuneConfig.model_validate({"optim": {"steps": 3, "batch_size": 4, "warmup_steps": 0}}).optim
    batches = Recorded(DemoBatches([demos], policy, CPU, MixtureSampler([len(demos)], [1.0], 0)))
    imitate(Imitation(policy, optim, batches, CPU), lambda step, row: None)
    assert batches.read == [(0, 4), (4, 4), (8, 4)]


class Accumulating:
    """A policy whose loss is the mean over rows of a squared error: `weight` times the pixel, against the command."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(0.25, dtype=torch.float64))
        self.passes: list[int] = []

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [("weight", self.weight)]

    def train(self) -> None:
        pass

    def supervised_loss(self, rows: PointRows, frames: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(rows))
        return ((self.weight * frames.double().flatten(1)[:, 0] - rows.actions[:, 0, 1].double()) ** 2).mean()


def accumulated(microbatch_size: int | None) -> tuple[float, float, list[int]]:
    """The gradient of a batch of ten rows, its loss, and the rows of each pass."""
    policy = Accumulating()
    optim = FinetuneConfig.model_validate(
        {"optim": {"steps": 3, "batch_size": 10, "microbatch_size": microbatch_size, "warmup_steps": 0}}
    ).optim
    generator = np.random.default_rng(3)
    actions = torch.from_numpy(generator.normal(size=(10, 2, 2)))
    frames = torch.from_numpy(generator.integers(0, 9, (10, 1, 2, 2, 3)).astype(np.uint8))

    class Whole:
        def batch(self, first: int, size: int) -> DemoBatch:
            return DemoBatch(PointRows(torch.zeros(size, dtype=torch.int64), actions), frames)

    imitation = Imitation(policy, optim, Whole(), CPU)
    imitation.optim = optim.model_copy(update={"max_grad_norm": 1e9})
    imitation.step()
    return float(policy.weight.grad), imitation.state.losses[0], policy.passes


def test_the_gradient_of_microbatches_is_that_of_the_batch():
    """Also where the last one is smaller: each row counts as much as any other."""
    whole, split, single = accumulated(None), accumulated(4), accumulated(1)
    assert (whole[2], split[2], single[2]) == ([10], [4, 4, 2], [1] * 10)
    bound = 32 * np.finfo(np.float64).eps * abs(whole[0])  # a sum of ten terms, each rounded a few times
    for found in (split, single):
        assert abs(found[0] - whole[0]) <= bound and abs(found[1] - whole[1]) <= bound
