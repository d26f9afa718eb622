"""What many tests build: observations, trajectories, configurations, small policies. One thread: fast and repeatable."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.decisions import rows_of, transition
from fakes.libero_assets import libero_assets  # noqa: F401 - a fixture
from fakes.suite import (  # noqa: F401 - hooks
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
)

from vlarl.algorithms.base import Estimate
from vlarl.config.schema import Config
from vlarl.decisions import Sampling, TrainBatch
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.training.batch import build_batch, with_estimates
from vlarl.types import Observation, Task, Trajectory, Transition

torch.set_num_threads(1)

DECODERS = ("parallel", "autoregressive")
INSTRUCTIONS = ("open the drawer", "put the zigzag bowl on the plate and close the drawer", "pick up the red cube")


@pytest.fixture(scope="session", autouse=True)
def key_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests are sealed with a key of their own, not with that of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Training sets the number of threads; the next test starts with one again."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def path_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward is looked for in the working folder, too, which is added to the path; the next test has another."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def observation(seed: int, instruction: str = INSTRUCTIONS[0], size: int = 56) -> Observation:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
    return Observation(images, rng.uniform(-1, 1, 8).astype(np.float32), instruction)


def trajectory(
    rewards: Sequence[Sequence[float]],
    *,
    num_executed: Sequence[int] | None = None,
    terminated: bool = False,
    success: bool = False,
    action_dim: int = 7,
    group: int = 0,
    seed: int = 0,
    first_id: int = 768,
) -> Trajectory:
    """An episode with the given rewards [T][K]: random tokens, images of one pixel, prompts of unequal length."""
    rng = np.random.default_rng(seed)
    counts = num_executed if num_executed is not None else [len(r) for r in rewards]
    transitions = tuple(
        transition(
            observation(100 * seed + t, INSTRUCTIONS[(seed + t) % 3], size=1),
            first_id + rng.integers(0, 256, len(r) * action_dim),
            rng.uniform(-6, -4, len(r) * action_dim).astype(np.float32),
            np.asarray(r, dtype=np.float32),
            count,
        )
        for t, (r, count) in enumerate(zip(rewards, counts, strict=True))
    )
    return Trajectory(
        task=Task("tabletop_spatial", 0, 0, seed, group),
        transitions=transitions,
        final_observation=observation(100 * seed + 99, INSTRUCTIONS[seed % 3], size=1),
        terminated=terminated,
        truncated=not terminated,
        success=success,
        policy_version=0,
    )


@pytest.fixture(name="observation")
def observation_fixture() -> Callable[..., Observation]:
    """observation(seed, instruction, size)."""
    return observation


@pytest.fixture(name="trajectory")
def trajectory_fixture() -> Callable[..., Trajectory]:
    """trajectory(rewards, num_executed=…, terminated=…, …)."""
    return trajectory


@pytest.fixture
def configure() -> Callable[..., Config]:
    """A configuration from nested options: configure(optim={"lr": 0.0})."""

    def make(**sections: dict[str, Any]) -> Config:
        return Config.model_validate(sections)

    return make


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy(decoder: str) -> OpenVLAPolicy:
    """A fresh tiny policy of each decoder, which may be changed."""
    return init_tiny(decoder, seed=3)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh tiny parallel policy on disk; read only."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    init_tiny("parallel", seed=3, chunk_length=8).save(folder)  # long chunks: few decisions
    return folder


@pytest.fixture
def act() -> Callable[..., list[Trajectory]]:
    """act(policy, temperature, lengths): episodes that the policy really acted in, on made-up observations.

    Prompts are ragged, and the last chunk of every second episode stops after its first step.
    """

    def run(policy: OpenVLAPolicy, temperature: float = 1.0, lengths: Sequence[int] = (2, 3, 1)) -> list[Trajectory]:
        engine = TorchEngine(policy, torch.device("cpu"))
        episodes = []
        for number, length in enumerate(lengths):
            seen = [observation(10 * number + t, INSTRUCTIONS[(number + t) % 3]) for t in range(length + 1)]
            inputs, seeds = policy.process(seen[:-1]), [10 * number + t for t in range(length)]
            decisions = engine.generate(inputs, Sampling(temperature), seeds)
            executed = [policy.num_steps] * length
            if number % 2:
                executed[-1] = 1
            rewards = np.zeros(policy.num_steps, dtype=np.float32)
            rows = zip(seen[:-1], rows_of(inputs), rows_of(decisions), executed, strict=True)
            transitions = tuple(Transition(at, read, made, rewards, count) for at, read, made, count in rows)
            task = Task("tabletop_spatial", number % 3, 0, number, number)
            episodes.append(Trajectory(task, transitions, seen[-1], bool(number % 2), not number % 2, False, 0))
        return episodes

    return run


@pytest.fixture
def policy_batch() -> Callable[..., TrainBatch]:
    """policy_batch(policy, episodes): a batch with random advantages, and value targets if the policy has a critic."""

    def build(policy: OpenVLAPolicy, episodes: Sequence[Trajectory]) -> TrainBatch:
        rng = np.random.default_rng(1)
        estimates, values = [], []
        for episode in episodes:
            shape = (len(episode.transitions), 1)
            advantages, returns, old_values = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
            estimates.append(Estimate(advantages, returns if policy.value_head is not None else None))
            values.append(torch.from_numpy(old_values))
        batch = with_estimates(build_batch(episodes), episodes, estimates, "chunk")
        batch = batch.to("cpu")  # with its inputs joined
        return batch if policy.value_head is None else replace(batch, old_values=torch.cat(values))

    return build
