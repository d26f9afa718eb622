"""docs/architecture.md is true of the tree: it lists every file once, and its table of imports is the one that is tested."""

import ast
import re
from pathlib import Path

import test_imports

import vlarl

PACKAGE = Path(vlarl.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def listed_files() -> list[str]:
    """The files of the tree on the page, by their indentation."""
    block = PAGE.split("src/vlarl/\n", 1)[1].split("```", 1)[0]
    folders: list[str] = []
    found: list[str] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"[\w.]+/?(?: \w+\.(?:py|yaml))*", line.strip())
        assert names is not None, line
        folders = folders[: depth - 1]
        if names.group(0).endswith("/"):
            folders.append(names.group(0))
        else:
            found += ["".join(folders) + name for name in names.group(0).split()]
    return found


def only_exposes(path: Path) -> bool:
    """Whether an `__init__.py` holds a docstring and imports alone: the page leaves these out."""
    kinds = (ast.Import, ast.ImportFrom)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    others = [node for node in body if not isinstance(node, kinds)]
    return all(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__")
        for node in others
    )


def test_the_tree_lists_every_file_once():
    files = [path for suffix in ("*.py", "*.yaml") for path in PACKAGE.rglob(suffix)]
    wanted = {
        str(path.relative_to(PACKAGE)) for path in files if not (path.name == "__init__.py" and only_exposes(path))
    }
    listed = [name for name in listed_files() if name.endswith((".py", ".yaml"))]
    assert sorted(listed) == sorted(set(listed)), "a file is listed twice"
    assert set(listed) == wanted


def test_the_table_of_imports_is_the_one_that_is_tested():
    section = PAGE.split("## Imports", 1)[1].split("\n## ", 1)[0]
    table: dict[str, set[str]] = {}
    for packages, allowed in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", section, re.MULTILINE):
        names = set(re.findall(r"`(\w+)`", allowed))
        plain = re.sub(r"`[^`]*`", "", allowed)
        names |= test_imports.BASE if "base" in plain else set()
        names |= test_imports.PARTS if "parts" in plain else set()
        table |= {package: names for package in re.findall(r"`(\w+)`", packages)}
    assert table.pop("__init__") == test_imports.ROOT_MAY_EXPOSE
    assert table == test_imports.ALLOWED
