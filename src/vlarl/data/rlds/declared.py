"""Mappings that a user declares, in a YAML file by the names of their datasets (docs/data.md).

my_robot:
  primary: observation/front
  state: [observation/joints, "zeros[1]"]
  action: ["action[0:6]", "action[6:7] | clip | invert"]
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vlarl.config.source.yaml_file import read_document
from vlarl.data.rlds.mapping import Mapping, NoOps, parts
from vlarl.data.rlds.ready import READY, ready_mapping
from vlarl.errors import UsageError

OPTION = "demos.mapping"
SUFFIXES = (".yaml", ".yml")
Texts = Annotated[tuple[str, ...], Field(min_length=1)]


class _Declared(BaseModel):
    """A mapping as the file has it; the meaning of each key is that of `Mapping`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Texts
    state: Texts = ("zeros[8]",)
    primary: str | None = None
    wrist: str | None = None
    secondary: str | None = None
    instruction: str = "language_instruction"
    success: str | None = "is_terminal"
    skip_first: Annotated[int, Field(ge=0)] = 0
    movement_from_state: bool = False
    noops: NoOps = "keep"
    gripper_is_absolute: bool | None = True


def declared_mappings(path: Path) -> dict[str, Mapping]:
    """The mappings of a file, by the names of their datasets."""
    document = read_document(path)
    if not document.data:
        raise UsageError(f"{OPTION}: {path} declares no mapping: write one below the name of its dataset.")
    return {str(name): _mapping(path, str(name), content) for name, content in document.data.items()}


def _mapping(path: Path, name: str, content: Any) -> Mapping:
    if not isinstance(content, dict):
        raise UsageError(f"{OPTION}: {path}: {name} is not a mapping: write `action: […]` and its other keys below it.")
    try:
        declared = _Declared.model_validate(content)
        values = dict(declared) | {"action": parts(*declared.action), "state": parts(*declared.state)}
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(field.name for field in fields(Mapping))
        raise UsageError(f"{OPTION}: {path}: {name}.{key}: {first['msg']}; the keys are {known}.") from error
    except ValueError as error:
        raise UsageError(f"{OPTION}: {path}: {name}: {error}.") from error
    return Mapping(**values)


def is_file(option: str) -> bool:
    """Whether the option names a file of mappings rather than a ready one."""
    return Path(option).suffix in SUFFIXES


def check_option(option: str | None) -> None:
    """Refuse a name that is not that of a ready mapping, and a file that can't be read."""
    if option is None:
        return
    if is_file(option):
        declared_mappings(Path(option))
    elif option not in READY:
        raise UsageError(
            f"{OPTION} = {option}: there is no ready mapping of this name; there are {', '.join(sorted(READY))}. Name "
            "one, or a YAML file of your own (docs/data.md)."
        )


def find_mapping(option: str | None, dataset: str) -> Mapping:
    """The mapping of a dataset: the one that is named, declared in the named file, or ready for its name."""
    check_option(option)
    if option is None:
        return ready_mapping(dataset)
    if not is_file(option):
        return READY[option]
    declared = declared_mappings(Path(option))
    if dataset not in declared and dataset not in READY:
        raise UsageError(
            f"{OPTION}: {option} declares {', '.join(declared)}, but not {dataset}, which has no ready mapping either: "
            f"add it as {dataset}."
        )
    return declared.get(dataset) or READY[dataset]
