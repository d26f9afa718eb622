"""How many simulator processes fit into the memory of this machine. Loads no simulator and no torch."""

from __future__ import annotations

from vlarl.config.known import SUITES
from vlarl.config.schema import Config
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores, available_memory

MIB = 1 << 20
READER_MIB = 363
"""What a worker of a Ray run takes beside its simulator, since the policy reads observations there: torch and Ray are
imported, 462 MiB as measured in place of 99."""


def fitting_envs(suite: str, reader_mib: int = 0) -> int | None:
    """Processes of a suite that fit into the memory that is free now, each with what reads its observations; None where
    that is not known."""
    facts, free = SUITES.get(suite), available_memory()
    if facts is None or facts.process_mib is None or free is None:
        return None
    return free // ((facts.process_mib + reader_mib) * MIB)


def default_processes(suite: str, reader_mib: int = 0) -> int:
    """The default number of processes of a suite: one for each core, as far as they fit."""
    fitting = fitting_envs(suite, reader_mib)
    return available_cores() if fitting is None else max(1, min(available_cores(), fitting))


def check_memory_for_envs(suite: str, num_envs: int | None, option: str = "env.num_envs", reader_mib: int = 0) -> None:
    """Refuse more simulator processes than fit, before the first one starts; the default (None) always fits."""
    fitting = fitting_envs(suite, reader_mib)
    if fitting is None or num_envs is None or num_envs <= fitting:
        return
    each = (SUITES[suite].process_mib or 0) + reader_mib
    if fitting == 0:
        raise UsageError(
            f"{option} = {num_envs}: a process of {suite} takes {each / 1024:.1f} GiB of memory, and less than that is "
            "free here; free some memory, or use a machine or a container with more."
        )
    raise UsageError(
        f"{option} = {num_envs}: that many processes of {suite} take {num_envs * each / 1024:.0f} GiB of memory, "
        f"{each / 1024:.1f} GiB each, and {fitting * each / 1024:.0f} GiB are free here; set {option} to "
        f"{fitting} or less."
    )


def check_memory_for_config(config: Config) -> None:
    """The same for a configuration, where one process and its simulators do everything."""
    if config.distributed.backend == "local":
        check_memory_for_envs(config.env.suite, config.env.num_envs)
