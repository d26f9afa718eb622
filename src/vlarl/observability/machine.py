"""One line that says what a run ran on; numbers without it can't be compared."""

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
    """Whether a GPU can be expected, by the files of its driver: asked before torch is loaded, which knows."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return None


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
