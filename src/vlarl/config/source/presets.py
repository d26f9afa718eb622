"""The configurations that ship with vlarl: YAML files in `vlarl/configs`, which `configs/` in a clone points to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import vlarl
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.problems import nearest
from vlarl.config.schema import Config, Section
from vlarl.config.source.spelling import suite_name
from vlarl.config.source.yaml_file import read_document
from vlarl.errors import UsageError

DEFAULT_PRESET = "tabletop_grpo"
PRESET_FOLDER = Path(vlarl.__file__).parent / "configs"
POLICIES = ("builtin:", "init:")
SHORTEST_PART = 3  # letters of a preset's name, such as ppo


def presets() -> dict[str, str]:
    """Name and one-line description (the file's first comment) of each shipped configuration."""
    return {path.stem: _first_comment(path) for path in sorted(PRESET_FOLDER.glob("*.yaml"))}


def presets_of(schema: type[Section]) -> dict[str, str]:
    """The same for one kind of configuration: those whose sections are the schema's."""
    names = set(schema.model_fields)
    return {name: text for name, text in presets().items() if set(read_document(_file(name)).data) <= names}


def presets_for_suite(suite: str) -> list[str]:
    """Presets of training whose suite is of the same family, such as libero."""
    family = suite.partition("_")[0]
    sections = ((name, read_document(_file(name)).data.get("env")) for name in presets())
    return [name for name, env in sections if isinstance(env, dict) and str(env.get("suite")).startswith(f"{family}_")]


def find_source(source: str | Path | None, schema: type[Section] = Config, root: str = Config().run.root) -> Path:
    """The file of a preset's name or a path; None is the default preset.

    If it does not exist, UsageError lists the presets of `schema`, or names a run in `root` with that name.
    """
    name = DEFAULT_PRESET if source is None else str(source)
    if source is None or is_preset(source):
        return _file(name)
    path = Path(name)
    if _can_exist(path) and path.is_dir():
        inside = path / "config.yaml"
        is_policy = any((path / file).is_file() for file in ("config.json", "adapter_config.json"))
        hint = f"; its configuration is {inside} (or --resume {path})" if inside.is_file() else ""
        hint = f"; {_as_policy(name)}" if is_policy else hint
        raise UsageError(f"{name} is a folder; a YAML file or a preset is needed{hint}")
    if _is_file(path):
        return path
    raise UsageError(_missing(name, presets_of(schema), root))


def _as_policy(name: str) -> str:
    return f"a policy to train is --policy.path {name}"


def _missing(name: str, known: Collection[str], root: str) -> str:
    """The message for a source that is neither a preset nor a file, with what may have been meant."""
    path = Path(name)
    if not path.name or not _can_exist(path):
        return f"{name[:40]!r} names neither a preset nor a file; presets: {', '.join(known)}"
    files = [other for suffix in (".yaml", ".yml") if _is_file(other := path.with_suffix(suffix))]
    if path.suffix in ("", ".yaml", ".yml") and files:
        return f"no file {name}; write {files[0]}"
    if path.suffix in (".yaml", ".yml"):
        hint = f"; the preset is called {path.stem}" if path.stem in known else f"; presets: {', '.join(known)}"
        return f"no file {name}{hint}"
    if name.startswith(POLICIES):
        return f"{name}: neither a preset nor a file; {_as_policy(name)}"
    if path.name == name and _is_file(Path(root) / name / "config.yaml"):
        return f"{name} is a run: continue it by `--resume {name}`, or start a new run from it by --policy.path"
    if len(path.parts) > 1:
        return f"no file {name}; {_as_policy(name)}; presets: {', '.join(known)}"
    if (folded := name.lower().replace("-", "_")) in known:
        return f"{name}: unknown preset; write {folded}"
    alike = _alike(name, known)
    hint = f"did you mean {' or '.join(map(repr, alike))}? Known" if alike else "known"
    return f"{name}: unknown preset; {hint}: {', '.join(known)}"


def is_preset(source: str | Path) -> bool:
    """Whether a word is the name of a preset; a path is always a file's."""
    return isinstance(source, str) and Path(source).name == source and _is_file(_file(source))


def is_source(text: str) -> bool:
    """Whether a word of a command line names a preset, or a YAML file that exists."""
    if is_preset(text):
        return True
    return text.endswith((".yaml", ".yml")) and _is_file(Path(text))


def may_be_source(text: str) -> bool:
    """Whether a word of a command line was meant to name a preset, a file or a suite, though it may be misspelt."""
    path = Path(text)
    is_path = path.name != text or path.suffix in (".yaml", ".yml") or _is_file(path)
    return is_path or text.startswith(POLICIES) or bool(_alike(text, presets())) or suite_name(text) in KNOWN_SUITES


def _alike(name: str, known: Collection[str]) -> list[str]:
    """Presets that a word may refer to: those that contain it, or else the most similar one."""
    folded = name.lower().replace("-", "_")
    near = nearest(folded, known)
    parts = [preset for preset in known if len(folded) >= SHORTEST_PART and folded in preset]
    return parts or ([near] if near else [])


def _is_file(path: Path) -> bool:
    return _can_exist(path) and path.is_file()


def _can_exist(path: Path) -> bool:
    """Whether file systems accept such a path at all: a path that is too long raises an error."""
    return "\0" not in str(path) and len(str(path)) < 4096 and all(len(part.encode()) < 256 for part in path.parts)


def _file(name: str) -> Path:
    return PRESET_FOLDER / f"{name}.yaml"


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
