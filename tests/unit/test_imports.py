"""Imports point one way, and the command line's help does not load torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vlarl

PACKAGE = Path(vlarl.__file__).parent

BASE = {"types", "errors", "json_files", "deadline", "devices", "recording", "solutions", "config"}
PARTS = BASE | {
    "algorithms",
    "decisions",
    "envs",
    "policies",
    "rewards",
    "observability",
    "rollout",
    "training",
    "weights",
}

# decisions <- types <- config, images <- envs, policies, rewards, observability <- algorithms, weights <- rollout
#           <- training <- data <- run, evaluation <- loop <- cli
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "decisions": set(),
    "types": {"decisions"},  # for its annotations alone: decisions load torch
    "deadline": {"errors"},
    "devices": {"errors", "config"},
    "recording": set(),
    "interrupt": {"errors"},
    "json_files": set(),
    "solutions": set(),
    "config": {"types", "errors", "json_files"},
    "images": {"types"},
    "envs": BASE,
    "policies": BASE | {"decisions", "images"},
    "weights": {"errors", "policies"},  # the contract of policies/base.py
    "rewards": BASE | {"decisions", "images", "policies"},  # judges are sampled like policies
    "observability": BASE,
    "algorithms": BASE | {"decisions", "policies"},  # the contract of policies/base.py
    "rollout": BASE | {"decisions", "envs", "policies", "rewards", "observability", "weights", "interrupt"},
    "training": BASE | {"algorithms", "decisions", "policies", "observability", "rollout", "weights"},
    "callbacks": {"types", "errors", "interrupt"},
    "auto_classes": set(),  # by name, when transformers is imported
    "data": PARTS | {"images", "interrupt"},
    "run": PARTS | {"interrupt", "callbacks", "distributed", "data"},
    "distributed": PARTS | {"data"},
    "evaluation": PARTS | {"interrupt", "run", "data"},
    "bench": PARTS,
    "export": BASE | {"policies", "observability", "evaluation"},
    "loop": PARTS | {"interrupt", "run", "evaluation", "callbacks", "export"},
    "cli": PARTS | {"bench", "run", "evaluation", "loop", "data", "export"},
    "python_messages": {"config", "errors", "cli"},
    "api": PARTS | {"run", "evaluation", "loop", "data", "callbacks", "cli", "python_messages"},
    "__main__": {"cli"},
}
ROOT_MAY_EXPOSE = PARTS | {"api", "auto_classes", "callbacks", "python_messages"}  # vlarl/__init__.py, lazily


def modules() -> list[tuple[str, Path]]:
    """(first part of the dotted name, file) for every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found.append((part, path))
    return found


def imported_names(path: Path) -> set[str]:
    """Dotted names of all that a file imports from vlarl, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("vlarl.")}


def imported_parts(path: Path) -> set[str]:
    """First parts of all vlarl modules that a file imports, at any depth."""
    parts = {name.split(".")[1] for name in imported_names(path)}
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()}


@pytest.mark.parametrize(("part", "path"), modules(), ids=lambda value: str(value).removeprefix(f"{PACKAGE}/"))
def test_imports_point_one_way(part, path):
    if part == "__init__":
        allowed = ROOT_MAY_EXPOSE
    else:
        assert part in ALLOWED, f"say in {__file__} what vlarl.{part} may import"
        allowed = ALLOWED[part] | {part}
    assert imported_parts(path) - allowed == set()


FAMILIES = sorted(path.parent.name for path in (PACKAGE / "policies").glob("*/__init__.py"))
KNOW_A_FAMILY = {
    "policies/load.py",  # the table of families
    "policies/fresh.py",  # the model that is made here
    "policies/tiny.py",
}


def test_only_policies_know_a_family_of_policies():
    """Whatever else there is works with any policy of the contracts in policies/base.py and policies/family.py."""
    assert "openvla" in FAMILIES
    found = set()
    for _, path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        own = {family for family in FAMILIES if name.startswith(f"policies/{family}/")}
        known = {name.split(".")[2] for name in imported_names(path) if name.startswith("vlarl.policies.")}
        if known & (set(FAMILIES) - own):
            found.add(name)
    assert found == KNOW_A_FAMILY


def test_the_table_itself_has_no_circle():
    tuple(TopologicalSorter(ALLOWED).static_order())


def test_the_parser_of_this_test_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "from vlarl import loop, __version__\ndef f():\n    import vlarl.envs.base\n    from vlarl.types import Task\n"
    )
    assert imported_parts(file) == {"loop", "envs", "types"}
    assert imported_names(file) == {"vlarl.loop", "vlarl.__version__", "vlarl.envs.base", "vlarl.types.Task"}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import vlarl; dir(vlarl)", ("torch", "numpy", "pydantic", "yaml")),
        ("import vlarl; vlarl.train, vlarl.evaluate, vlarl.load_config", ("torch", "transformers")),
        ("import vlarl.cli", ("torch", "numpy", "pydantic", "yaml")),
        ("from vlarl.cli import main; main(['--help'])", ("torch", "numpy", "pydantic", "yaml")),
        ("from vlarl.cli import main; main(['train', '--help'])", ("torch", "numpy", "transformers")),
        ("from vlarl.cli import main; main(['train', '--dry-run'])", ("torch", "numpy", "transformers")),
        ("from vlarl.cli import main; main(['finetune', '--dry-run'])", ("torch", "numpy", "transformers")),
        ("from vlarl.cli import main; main(['status', '--run.root', 'nowhere'])", ("torch", "numpy", "transformers")),
        ("import vlarl.cli.detach", ("torch", "numpy", "transformers")),
        ("import vlarl.policies.load", ("transformers", "vlarl.policies.openvla.policy", "vlarl.policies.tiny")),
    ],
)
def test_the_command_line_loads_only_what_it_needs(code, absent):
    assert loaded(code, absent) == "LOADED []"


def loaded(code: str, modules: tuple[str, ...]) -> str:
    """LOADED and those of the modules that a process has loaded after running the code."""
    check = f"{code}\nimport sys\nprint('LOADED', sorted(set({modules!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


SLOW = ("peft", "bitsandbytes", "transformers.models.auto")  # seconds of every worker, command and test process

PLAYED = """
import tempfile
from pathlib import Path
import numpy as np
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.load import load_policy
policy = load_policy("builtin:tiny-openvla")
policy.prepare_training(ModelConfig(), LoraConfig(), seed=0)
policy.weights_changed()
policy.reset_adapters(0)
with policy.without_adapters():
    action = policy.predict_action(np.zeros((64, 64, 3), np.uint8), "pick up the cube", np.zeros(8, np.float32))
assert np.isfinite(action).all()
with tempfile.TemporaryDirectory() as folder:
    policy.save(Path(folder))
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import vlarl.loop, vlarl.run.parts, vlarl.distributed.learners", SLOW),
        (PLAYED, ("peft", "bitsandbytes")),  # the language model itself loads transformers.models.auto
    ],
    ids=["modules", "policy"],
)
def test_peft_is_loaded_for_adapters_only(code, absent):
    assert loaded(code, absent) == "LOADED []"


def test_adapters_do_load_peft():
    """The check above sees what it looks for."""
    lora = PLAYED.replace("LoraConfig()", "LoraConfig(enabled=True)")
    assert loaded(lora, ("peft",)) == "LOADED ['peft']"


def test_adapters_load_without_a_warning_of_kernels_that_are_not_needed():
    """bitsandbytes warns on some CPUs only, so its own line is checked: it must not be printed."""
    warn = "import logging; logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm')\n"
    code = PLAYED.replace("LoraConfig()", "LoraConfig(enabled=True)") + warn
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gemm" not in done.stderr


def test_help_loads_nothing_but_the_standard_library_and_its_own_modules():
    """So it is fast on any machine."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom vlarl.cli import main\nmain(['--help'])\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(len(set(sys.modules) - before), *sorted(roots))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *roots = done.stdout.splitlines()[-1].split()
    assert roots == ["vlarl"] and int(count) < 200
