"""Location of a recorded dataset: checked before anything is loaded, and again when the dataset is read."""

from __future__ import annotations

from pathlib import Path

from vlarl.errors import UsageError

INFO = "dataset_info.json"


def find_dataset(path: Path) -> Path:
    """The folder with dataset_info.json: the path itself, or the only such folder at most two levels below it."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory: name the folder of an RLDS dataset, such as data/NAME/1.0.0.")
    found = (
        [path]
        if (path / INFO).is_file()
        else sorted(p.parent for p in [*path.glob(f"*/{INFO}"), *path.glob(f"*/*/{INFO}")])
    )
    if not found and (path / "meta" / "info.json").is_file():
        raise UsageError(f"{path} is a LeRobot dataset, which is not supported: name the folder of an RLDS dataset.")
    if not found:
        raise UsageError(f"{path} holds no RLDS dataset: there is no {INFO} in it or below it.")
    if len(found) > 1:
        raise UsageError(f"{path} holds several datasets; name one of {', '.join(map(str, found))}.")
    return found[0]
