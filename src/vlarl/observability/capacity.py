"""How many simulator processes fit into the memory of this machine. Loads no simulator and no torch."""

from __future__ import annotations

from vlarl.config.known import SUITES
from vlarl.config.schema import Config
from vlarl.errors import UsageError
from vlarl.observability.machine import available_memory

MIB = 1 << 20


def fitting_envs(suite: str) -> int | None:
    """Processes of a suite that fit into the memory that is free now; None where that is not known."""
    facts, free = SUITES.get(suite), available_memory()
    if facts is None or facts.process_mib is None or free is None:
        return None
    return free // (facts.process_mib * MIB)


def refuse_crowd(suite: str, num_envs: int, option: str = "env.num_envs") -> None:
    """Refuse more simulator processes than fit, before the first one starts."""
    fitting = fitting_envs(suite)
    if fitting is None or num_envs <= fitting:
        return
    each = SUITES[suite].process_mib or 0
    raise UsageError(
        f"{option} = {num_envs}: so many processes of {suite} take {num_envs * each / 1024:.0f} GiB of memory, "
        f"{each / 1024:.1f} GiB each, and {fitting * each / 1024:.0f} GiB are free here; set {option} to "
        f"{max(fitting, 1)} or less."
    )


def refuse_crowd_here(config: Config) -> None:
    """The same for what a configuration asks for, where all is done by one process and its simulators."""
    if config.env.num_envs is not None and config.distributed.backend == "local":
        refuse_crowd(config.env.suite, config.env.num_envs)
