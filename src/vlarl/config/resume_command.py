"""How a run is resumed: by a command, or by a call in Python if its reward or environment was given as a callable.

    vlarl train --resume runs/mine --run.iterations 20
    vlarl finetune --resume runs/base --optim.steps 20000
    vlarl.train(resume="runs/mine", reward=quick, overrides={"run.iterations": 20})

Imports neither torch nor a simulator.
"""

from __future__ import annotations

import json
import keyword
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlarl.config.callables import PREFIX, is_given
from vlarl.config.paths import brief
from vlarl.config.schema import Config
from vlarl.config.source.yaml_file import read_document
from vlarl.errors import UsageError

Sections = Mapping[str, Mapping[str, Any]]

ARGUMENTS = {"gym.env": "env", "reward.source": "reward"}
"""The arguments of `vlarl.train` by the option that they set; any other option goes into its overrides."""


def resume_command(run: Path, options: Mapping[str, object] | None = None, start: str = "") -> str:
    """The command, or the call, that resumes a run with these options, by default from its newest checkpoint."""
    options = options or {}
    given = dict(_given(_sections(run / "config.yaml")))
    if not given:
        flags = [f"--from {start}"] if start else []
        flags += [f"--{option} {value}" for option, value in options.items()]
        command = "finetune" if is_supervised(run) else "train"
        return " ".join([f"vlarl {command} --resume", shlex.quote(brief(run)), *flags])
    place = brief(run / "checkpoints" / start if start else run)
    arguments = [f"{ARGUMENTS[option]}={value}" for option, value in given.items() if option in ARGUMENTS]
    others = [f'"{option}": {value}' for option, value in (given | dict(options)).items() if option not in ARGUMENTS]
    overrides = [f"overrides={{{', '.join(others)}}}"] if others else []
    return f"vlarl.train({', '.join([f'resume={json.dumps(place, ensure_ascii=False)}', *arguments, *overrides])})"


def is_supervised(run: Path) -> bool:
    """Whether a run is one of `vlarl finetune`: its configuration has the section `demos`."""
    file = run / "config.yaml"
    try:
        return file.is_file() and b"\ndemos:" in b"\n" + file.read_bytes()
    except OSError:
        return False


def refuse_without_callables(config: Config, run: Path) -> None:
    """Refuse to resume a run without the callables that it was given in Python, before anything is loaded."""
    sections: Sections = config.model_dump()
    for option, names in _names(sections):
        missing = [name for name in names if is_given(name) and name not in getattr(config, option.split(".")[0]).given]
        if missing:
            raise UsageError(
                f"{option} = {missing[0]!r} was given as a callable in Python, which config.yaml cannot hold: resume "
                f"the run in Python, by {resume_command(run)}; or set {option} to module:function."
            )


def _names(sections: Sections) -> Iterator[tuple[str, list[str]]]:
    """The options in use that may name callables, with these names."""
    gym, reward = sections.get("gym", {}), sections.get("reward", {})
    source, sources = reward.get("source"), reward.get("sources")
    if sections.get("env", {}).get("suite") == "gym":
        yield "gym.env", [str(gym.get("env"))]
    yield "reward.source", [str(source)]
    if source == "combined" and isinstance(sources, list | tuple):
        yield "reward.sources", [str(name) for name in sources]


def _given(sections: Sections) -> Iterator[tuple[str, str]]:
    """Each option that names a callable, with the value to write in Python."""
    for option, names in _names(sections):
        if any(map(is_given, names)):
            values = [_variable(name) if is_given(name) else json.dumps(name) for name in names]
            yield option, values[0] if option in ARGUMENTS else f"[{', '.join(values)}]"


def _variable(name: str) -> str:
    """The callable's name in its module: `quick` for `python:my_module.quick`, `...` for a lambda."""
    last = name.rpartition(".")[2]
    return last if last.isidentifier() and not keyword.iskeyword(last) else "..."


def _sections(file: Path) -> Sections:
    """The sections of a run's configuration that names callables; empty for any other, and if it can't be read."""
    try:
        if not file.is_file() or PREFIX.encode() not in file.read_bytes():  # parsing takes a hundred times as long
            return {}
        data = read_document(file).data
    except (OSError, UsageError, UnicodeDecodeError):
        return {}
    return {name: content for name, content in data.items() if isinstance(content, dict)}
