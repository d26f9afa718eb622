"""Makes an installed torchvision that was built for CUDA importable beside a CPU build of torch.

    VENV/bin/python scripts/torchvision_cpu.py

The compiled operators of such a torchvision can't be loaded, and its own code fails at registering what belongs to
them. Nothing here calls them: image and video transforms are plain torch. So their names are declared before that code
runs, in the installed copy, since it must happen in every process that imports torchvision, vLLM's included. A
torchvision that can be imported is left as it is.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

OPERATORS = ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
BACKWARD = tuple(f"_{name}_backward" for name in OPERATORS[2:])
FIRST_IMPORT = "from . import extension"  # loads the operators; what needs them comes after it
DECLARATION = f"""
if torch.version.cuda is None:  # declared by vlarl's scripts/torchvision_cpu.py: the compiled operators are for CUDA
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in {(*OPERATORS, *BACKWARD)!r}:
        _operators.define(f"{{_name}}(Tensor x) -> Tensor")
"""


def can_be_imported() -> bool:
    """Whether a new process can import torchvision."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def main() -> None:
    """Patch the installed copy if it needs it."""
    if can_be_imported():
        return
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        sys.exit("error: torchvision is not installed")
    file = Path(found.origin)
    source = file.read_text(encoding="utf-8")
    if source.count(FIRST_IMPORT) == 1 and DECLARATION not in source:
        file.write_text(source.replace(FIRST_IMPORT, DECLARATION + FIRST_IMPORT), encoding="utf-8")
    if not can_be_imported():
        file.write_text(source, encoding="utf-8")
        sys.exit(f"error: torchvision can't be imported, and {file} is not one that this script knows")


if __name__ == "__main__":
    main()
