"""What the workers of a run take of a cluster, and which machines have that much free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vlarl.config.derive import num_engines
from vlarl.config.schema import Config, RanksConfig
from vlarl.errors import UsageError

ROUNDING = 1e-6  # of sums of fractions


@dataclass(frozen=True)
class Resources:
    """What one worker reserves."""

    cpus: float
    gpus: float

    def bundle(self) -> dict[str, float]:
        """In Ray's format."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


@dataclass(frozen=True)
class Demand:
    """The workers of a run by role, and the resources of each."""

    learners_per_node: tuple[int, ...]
    learner: Resources
    num_engines: int
    engine: Resources
    num_envs: int
    env: Resources
    num_rewards: int
    reward: Resources
    colocate: bool

    @classmethod
    def of(cls, config: Config, num_env_workers: int, on_gpus: bool) -> Demand:
        """What a configuration needs."""
        d, cpus = config.distributed, config.distributed.worker_cpus
        size = config.vllm.tensor_parallel_size
        engine_gpus = d.engine_gpus if size == 1 else float(size)
        return cls(
            learners_per_node=d.learners_per_node,
            learner=Resources(cpus, d.learner_gpus if on_gpus else 0.0),
            num_engines=num_engines(config),
            engine=Resources(cpus, engine_gpus if on_gpus else 0.0),
            num_envs=num_env_workers,
            env=Resources(cpus, d.env_gpus if on_gpus else 0.0),
            num_rewards=d.num_reward_workers,
            reward=Resources(cpus, d.reward_gpus if on_gpus else 0.0),
            colocate=d.colocate,
        )

    @classmethod
    def of_learners(cls, distributed: RanksConfig, on_gpus: bool) -> Demand:
        """Learner ranks alone, for supervised training."""
        learner = Resources(distributed.worker_cpus, distributed.learner_gpus if on_gpus else 0.0)
        none = Resources(0.0, 0.0)
        return cls(distributed.learners_per_node, learner, 0, none, 0, none, 0, none, colocate=False)

    def without_learners(self) -> Demand:
        """The same engines and environments, for an evaluation."""
        return replace(self, learners_per_node=(), num_rewards=0, colocate=False)

    @property
    def num_learners(self) -> int:
        """Learner ranks on all machines."""
        return sum(self.learners_per_node)

    @property
    def share_gpus(self) -> bool:
        """Whether each engine runs on a learner's GPU."""
        return self.colocate and self.learner.gpus > 0 and self.engine.gpus > 0

    @property
    def fit_on_one_gpu(self) -> bool:
        """Whether an engine may run on a learner's GPU: by `colocate`, or since both fit on one."""
        on_gpus = self.learner.gpus > 0 and self.engine.gpus > 0
        return on_gpus and (self.colocate or self.learner.gpus + self.engine.gpus <= 1 + ROUNDING)

    def learner_bundle(self) -> dict[str, float]:
        """The bundle of one learner, with an engine in it where they are colocated."""
        shared = self.engine if self.colocate else Resources(0.0, 0.0)
        return Resources(self.learner.cpus + shared.cpus, self.learner.gpus + shared.gpus).bundle()

    def other_bundles(self) -> list[dict[str, float]]:
        """One bundle for each of the others: engines, environments, rewards."""
        engines = 0 if self.colocate else self.num_engines
        workers = [self.engine] * engines + [self.env] * self.num_envs + [self.reward] * self.num_rewards
        return [resources.bundle() for resources in workers]

    def total(self, resource: str) -> float:
        """CPUs or GPUs of all workers together."""
        bundles = [self.learner_bundle()] * self.num_learners + self.other_bundles()
        return sum(bundle.get(resource, 0.0) for bundle in bundles)

    def describe(self) -> str:
        """The workers in words, for messages."""
        counts = {
            "learner": self.num_learners,
            "engine": self.num_engines,
            "environment worker": self.num_envs,
            "reward worker": self.num_rewards,
        }
        return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in counts.items() if count)


def choose_machines(demand: Demand, free: Mapping[str, Mapping[str, float]], in_all: Mapping[str, float]) -> list[str]:
    """A machine for each entry of learners_per_node, the one with the most free resources for the largest entry.

    Other runs may share the cluster, so only what is `free` on each machine counts; `in_all` is what the cluster has.
    UsageError says what is missing.
    """
    total = {kind: sum(has.get(kind, 0.0) for has in free.values()) for kind in ("CPU", "GPU")}
    wanted = {kind: demand.total(kind) for kind in total}
    if missing := [_amount(wanted[k] - total[k], k) for k in total if wanted[k] > total[k] + ROUNDING]:
        raise UsageError(
            f"distributed: {demand.describe()} take {describe(wanted)}; the cluster has {describe(total)} free of "
            f"{describe(in_all)}: {' and '.join(missing)} missing. Add machines, or lower distributed.worker_cpus, "
            "the number of workers or their GPU fractions."
        )
    counts, bundle = demand.learners_per_node, demand.learner_bundle()
    chosen: dict[int, str] = {}
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        wanted = {kind: amount * counts[index] for kind, amount in bundle.items()}
        fitting = [node for node, has in free.items() if node not in chosen.values() and _holds(has, wanted)]
        if not fitting:
            raise UsageError(
                f"distributed.learners_per_node = {list(counts)}: that takes {len(counts)} "
                f"machine{'s' * (len(counts) > 1)}, one of them with {describe(wanted)}; the cluster's {len(free)} "
                f"have {', '.join(describe(has) for has in free.values())} free. Wait for other runs to end, add "
                "machines, or divide the learners among more of them."
            )
        chosen[index] = max(fitting, key=lambda node: (free[node].get("GPU", 0.0), free[node].get("CPU", 0.0)))
    return [chosen[index] for index in range(len(counts))]


def fits(demand: Demand, free: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether machines with these free resources can run all workers."""
    try:
        choose_machines(demand, free, {})
    except UsageError:
        return False
    return True


def _holds(node: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(node.get(kind, 0.0) + ROUNDING >= amount for kind, amount in wanted.items())


def describe(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words."""
    return " and ".join(_amount(resources.get(kind, 0.0), kind) for kind in ("CPU", "GPU"))


def _amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind}{'' if amount == 1 else 's'}"
