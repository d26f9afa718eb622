"""One process of engines for all tests of this folder. A missing vllm is a failure, not a skip."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from engine_process import BUILTIN, FLOAT32, EngineProcess, RemoteEngine
from fakes.syncing import all_weights, sync

from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.types import Observation, Task


@pytest.fixture(scope="session")
def engines() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def shared_engine(engines: EngineProcess) -> RemoteEngine:
    """The built-in policy, with both caches in use."""
    return engines.start("builtin", BUILTIN, {**FLOAT32, "prefix_caching": True})


@pytest.fixture
def engine(shared_engine: RemoteEngine) -> RemoteEngine:
    """The engine with the checkpoint's own weights, whatever a test before did to it."""
    if shared_engine.version != 0:
        sync(shared_engine, all_weights(load_policy(BUILTIN)), 0)
    return shared_engine


@pytest.fixture
def policy() -> OpenVLAPolicy:
    return load_policy(BUILTIN)


@pytest.fixture(scope="session")
def observations() -> Callable[[int], list[Observation]]:
    """observations(count): the first ones of as many episodes, with prompts of unequal lengths, from both cameras."""

    def see(count: int) -> list[Observation]:
        pool = TabletopPool("tabletop_spatial", count, 56, ("agent", "wrist"))
        tasks = [Task("tabletop_spatial", i % 10, i // 10, i) for i in range(count)]
        return pool.reset(range(count), tasks)

    return see


@torch.no_grad()
def disturb(policy: OpenVLAPolicy, seed: int) -> None:
    """Change every weight by a few per cent of its tensor's size."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        scale = 0.05 * parameter.abs().mean().clamp(min=1e-3)
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.fixture(name="disturb")
def disturb_fixture() -> Callable[[OpenVLAPolicy, int], None]:
    return disturb


@pytest.fixture
def bytes_of() -> Callable[[OpenVLAPolicy], dict[str, bytes]]:
    """Every parameter to the bit."""
    return lambda policy: {n: np.asarray(p.detach()).tobytes() for n, p in policy.named_parameters()}
