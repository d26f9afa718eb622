"""Registers OpenVLA folders with the Auto classes of transformers, when and only if a program imports those.

    import vlarl                          a watch on three modules of transformers, in microseconds
    from transformers import AutoConfig   … is imported, then `vlarl.policies.openvla.hf` registers its class

transformers has no entry points for that, and importing it takes seconds, which neither `import vlarl` nor the command
line should take. So `watch` adds a finder to `sys.meta_path`: it finds these modules as Python would, and registers the
classes after they were executed. Where they have been imported already, it registers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO_MODULES = tuple(f"transformers.models.auto.{name}_auto" for name in ("configuration", "modeling", "processing"))


class AutoWatch(MetaPathFinder):
    """Notices when transformers' Auto classes are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as Python finds it; its loader also registers the classes."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in AUTO_MODULES else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Register the classes as soon as transformers' Auto classes are there; once is enough."""
    if any(isinstance(finder, AutoWatch) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AutoWatch())
    for name in AUTO_MODULES:
        if (module := sys.modules.get(name)) is not None:
            register(module)


def register(module: ModuleType) -> None:
    """Register the class that this module of transformers keeps a table of."""
    import_module("vlarl.policies.openvla.auto").register(module)
