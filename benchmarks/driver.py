"""What passes through the driver of a Ray cluster for each decision: bytes, and its processor time. Prints JSON.

    python benchmarks/driver.py [--decisions 12000] [--rollout-only]    stores as large as vlarl makes them by default
    python benchmarks/driver.py --store-mib 512                         smaller ones: objects spill and are read back
    python benchmarks/driver.py --env-workers 8 --slots 8               each slot in a worker of its own, as a simulator
    PYTHONPATH=<src of an earlier commit> python benchmarks/driver.py          the same for other code

One iteration of a real run: slots that show 256 px images, on two environment nodes (raylets of this machine), and a
learner and an engine on a third; the policy is tiny and reads 256 px. Bytes are those of all objects that the driver
serializes for calls and puts, and of those that it deserializes; what it names and never reads is not counted, and none
of it is small enough to come with a reply (100 kB). Processor time is that of the driver's process, with all threads of
Ray in it. Another process looks up once a second how full the stores are. A node reads what another one has spilled
from its files, and Ray counts as restored only what a node reads back for itself: an update on all decisions read it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from image_env import SIZE
from ray._private import internal_api
from ray._private.serialization import SerializationContext
from ray._private.worker import Worker
from ray.cluster_utils import Cluster as Machines

from vlarl import loop
from vlarl.config.schema import Config
from vlarl.distributed.store_size import default_store_mib, rows_at_once
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer

MIB = 1 << 20
STEPS, CHUNK = 200, 4  # 50 decisions an episode


@dataclass
class Phase:
    """What the driver did in a part of the run."""

    received: int = 0  # bytes
    sent: int = 0
    cpu_s: float = 0.0  # of the process
    own_s: float = 0.0  # of the loop's thread alone
    wall_s: float = 0.0


@dataclass
class Meter:
    """Counts in the driver."""

    phases: dict[str, Phase] = field(default_factory=dict)
    current: Phase = field(default_factory=Phase)

    def install(self) -> None:
        """Count all objects that this process serializes and deserializes."""
        serialize, deserialize = SerializationContext.serialize, Worker.deserialize_objects

        def counted_serialize(context: Any, value: Any) -> Any:
            made = serialize(context, value)
            self.current.sent += made.total_bytes
            return made

        def counted_deserialize(worker: Any, objects: Any, *others: Any, **named: Any) -> Any:
            self.current.received += sum(len(part) for each in objects for part in each[:2] if part is not None)
            return deserialize(worker, objects, *others, **named)

        SerializationContext.serialize = counted_serialize
        Worker.deserialize_objects = counted_deserialize

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """What happens in the block belongs to this phase."""
        phase, before = self.phases.setdefault(name, Phase()), self.current
        cpu, own, wall, self.current = time.process_time(), time.thread_time(), time.monotonic(), phase
        try:
            yield
        finally:
            phase.cpu_s += time.process_time() - cpu
            phase.own_s += time.thread_time() - own
            phase.wall_s += time.monotonic() - wall
            self.current = before


def addresses() -> list[tuple[str, int]]:
    """Where every node replies."""
    return [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]]


def store_stats(nodes: Sequence[tuple[str, int]]) -> list[Any]:
    """The statistics of the nodes' object stores."""
    return [internal_api.node_stats(host, port, False).store_stats for host, port in nodes]


def watch_stores(nodes: Sequence[tuple[str, int]], ended: Any, peak: Any) -> None:
    """Note how many bytes the fullest store has had; in a process of its own."""
    while not ended.wait(1.0):
        peak.value = max(peak.value, *(each.object_store_bytes_used for each in store_stats(nodes)))


def save_policy(folder: Path) -> None:
    """A policy that reads 256 px and takes a millisecond."""
    raw = dict(tiny_config("parallel", CHUNK, image_size=SIZE).raw)
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 64}
    raw["timm_model_kwargs"] = [{**small, "reg_tokens": 1}, {**small, "mlp_ratio": 4.0}]
    raw["text_config"] = raw["text_config"] | {
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    }
    policy = OpenVLAPolicy(parse_config(raw), build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(0))
    policy.save(folder)


def configured(root: Path, decisions: int, slots: int, workers: int) -> Config:
    """The run."""
    episodes = decisions * CHUNK // STEPS
    return Config.model_validate(
        {
            "run": {"name": "driver", "root": str(root), "device": "cpu", "num_threads": 1, "iterations": 1},
            "env": {"suite": "gym", "num_envs": slots, "max_steps": STEPS, "image_size": SIZE},
            "gym": {
                "env": "image_env:Images",
                "batched": True,
                "images": ("pixels",),
                "instructions": ("look at the noise",),
                "num_states": 500,
            },
            "policy": {"path": str(root / "policy")},
            "rollout": {"num_groups": episodes // 4, "group_size": 4},
            "reward": {"source": "dense"},
            "algorithm": {"name": "reinforce"},
            "optim": {"lr": 1e-6, "minibatches": 1, "microbatch_size": 128},
            "eval": {"interval": 0, "states_per_task": 1, "videos": 0},
            "checkpoint": {"interval": 0, "best_return": False},
            "logging": {"tensorboard": False, "report": False},
            "distributed": {"backend": "ray", "num_env_workers": workers, "worker_cpus": 1.0},
        }
    )


def default_mib(config: Config) -> int:
    """The store of a cluster that vlarl starts itself for this run; here each of the nodes has one."""
    rows = rows_at_once(config, 0, STEPS, CHUNK)
    return default_store_mib(config, rows, 3 * SIZE**2, with_images=False)


def run(config: Config, decisions: int, store_mib: int, root: Path, rollout_only: bool) -> dict[str, Any]:
    """Measure a run on raylets that are started here."""
    store = {"object_store_memory": store_mib * MIB}
    # The learner takes the machine with the most cores; what is left of it takes the engine alone.
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    for _ in range(2):
        machines.add_node(num_cpus=config.distributed.num_env_workers // 2, **store)
    ray.init(address=machines.address, log_to_driver=False)
    save_policy(root / "policy")
    meter, context = Meter(), multiprocessing.get_context("spawn")
    ended, peak = context.Event(), context.Value("q", 0)
    watching = context.Process(target=watch_stores, args=(addresses(), ended, peak), daemon=True)
    watching.start()
    if rollout_only:
        loop.improve = lambda parts, session, gathered: {}
    for name in ("roll_out",) if rollout_only else ("roll_out", "improve"):
        measured(meter, name)
    meter.install()
    loop.train(config)
    ended.set()
    watching.join()
    stats = store_stats(addresses())
    found = {
        name: {
            "bytes a decision": round((phase.received + phase.sent) / decisions),
            "ms of the driver a decision": round(1000 * phase.cpu_s / decisions, 3),
            "of these in the loop's thread": round(1000 * phase.own_s / decisions, 3),
            "seconds": round(phase.wall_s, 1),
        }
        for name, phase in meter.phases.items()
    }
    both = sum(phase.cpu_s for phase in meter.phases.values())
    found["ms of the driver a decision, in all"] = round(1000 * both / decisions, 3)
    found["load average"] = [round(load, 1) for load in os.getloadavg()]
    found["store"] = {
        "MiB": store_mib,
        "peak MiB": peak.value // MIB,
        "spilled MiB": sum(each.spilled_bytes_total for each in stats) // MIB,
        "restored MiB": sum(each.restored_bytes_total for each in stats) // MIB,
    }
    ray.shutdown()
    machines.shutdown()
    return found


def measured(meter: Meter, name: str) -> None:
    """Make a function of the loop a phase."""
    function = getattr(loop, name)

    def wrapped(*arguments: Any) -> Any:
        with meter.measuring(name):
            return function(*arguments)

    setattr(loop, name, wrapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=12_000)
    parser.add_argument("--store-mib", type=int, help="object store of each node; what vlarl would choose by default")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--env-workers", type=int, default=2, help="half of them on each of two nodes")
    parser.add_argument("--rollout-only", action="store_true", help="without the update")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        config = configured(Path(root), options.decisions, options.slots, options.env_workers)
        store_mib = options.store_mib or default_mib(config)
        found = run(config, options.decisions, store_mib, Path(root), options.rollout_only)
    shape = {"decisions": options.decisions, "slots": options.slots, "environment workers": options.env_workers}
    json.dump(shape | found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
