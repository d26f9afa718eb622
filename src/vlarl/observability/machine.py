"""One line that describes the machine of a run; measurements without it can't be compared."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from vlarl.config.words import counted


def describe_machine() -> str:
    """The processor, its usable cores, the memory, and the GPU when torch is loaded and sees one."""
    parts = [f"{_processor()}, {counted(available_cores(), 'core')}"]
    if memory := _memory_gib():
        parts.append(f"{memory:.0f} GiB memory")
    if gpu := _gpu():
        parts.append(gpu)
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return name.replace("(R)", "").replace("(TM)", "")


def available_cores() -> int:
    """Cores that this process may use: a container or a job scheduler often grants fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def may_have_gpu() -> bool:
    """Whether a GPU is likely, judged by its driver's files: used before torch, which knows for sure, is loaded."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that new processes can use: what the machine has free, or less where a container or a job
    scheduler sets a limit; None where it is not known."""
    found = [free] if (free := _machine_memory(proc)) is not None else []
    found += [left for folder in _groups(proc, groups) if (left := _left_in(folder)) is not None]
    return max(0, min(found)) if found else None


def _machine_memory(proc: Path) -> int | None:
    lines = _text(proc / "meminfo").splitlines()
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def _groups(proc: Path, groups: Path) -> list[Path]:
    """The folders of this process's control groups, from its own to the root, including those of version 1."""
    own = next((line[3:] for line in _text(proc / "self" / "cgroup").splitlines() if line.startswith("0::")), "/")
    inside = [part for part in own.split("/") if part and part != ".."]
    chain = [groups.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)]
    return [*chain, groups / "memory"]


def _left_in(folder: Path) -> int | None:
    """What a control group may still allocate; its cached files count as free, as they do for the machine."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if " " in line)
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            return int(limit) - int(used) + cached
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gpu() -> str | None:
    # Asking must not cost an import of torch: commands that only read a run call this too.
    if "torch" not in sys.modules:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count > 1 else str(torch.cuda.get_device_name(0))


def gpu_peak_gib() -> float | None:
    """The most GPU memory that tensors of this process have taken so far, in GiB; None without a GPU in use."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_allocated() / 2**30
