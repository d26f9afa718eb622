"""The configurations that ship with vlarl: YAML files in `vlarl/configs`, which `configs/` in a clone points to."""

from __future__ import annotations

from pathlib import Path

import vlarl
from vlarl.config.problems import unknown
from vlarl.config.schema import Section
from vlarl.config.yaml_source import read_document
from vlarl.errors import UsageError

DEFAULT_PRESET = "tabletop_grpo"
PRESET_FOLDER = Path(vlarl.__file__).parent / "configs"


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


def find_source(source: str | Path | None) -> Path:
    """The file that a preset's name or a path stands for; None is the default preset."""
    name = DEFAULT_PRESET if source is None else str(source)
    preset = _file(name)
    if isinstance(source, str | None) and Path(name).name == name and preset.is_file():
        return preset
    path = Path(name)
    if path.is_dir():
        inside = path / "config.yaml"
        hint = f"; its configuration is {inside} (or --resume {path})" if inside.is_file() else ""
        raise UsageError(f"{name} is a folder; a YAML file or a preset is needed{hint}")
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"no file {name}; presets: {', '.join(presets())}")
    raise UsageError(f"{name}: {unknown('preset', name, list(presets()))}")


def _file(name: str) -> Path:
    return PRESET_FOLDER / f"{name}.yaml"


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
