"""Location of a recorded dataset: checked before anything is loaded, and again when the dataset is read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vlarl.config.finetune import DemoConfig
from vlarl.config.mixtures import parse_mixture
from vlarl.errors import UsageError

INFO = "dataset_info.json"
LEROBOT_INFO = "meta/info.json"

Format = Literal["rlds", "lerobot"]


def find_recording(path: Path) -> tuple[Format, Path]:
    """The format and the folder of a recorded dataset."""
    if (path / LEROBOT_INFO).is_file():
        return "lerobot", path
    return "rlds", find_dataset(path)


def find_dataset(path: Path) -> Path:
    """The folder with dataset_info.json: the path itself, or the only such folder at most two levels below it."""
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory: name the folder of an RLDS dataset, such as data/NAME/1.0.0, or of a LeRobot "
            "dataset, which holds meta/info.json."
        )
    found = (
        [path]
        if (path / INFO).is_file()
        else sorted(p.parent for p in [*path.glob(f"*/{INFO}"), *path.glob(f"*/*/{INFO}")])
    )
    if not found and (path / LEROBOT_INFO).is_file():
        raise UsageError(f"{path} is a LeRobot dataset, and not an RLDS dataset: open it with LeRobotDataset.")
    if not found:
        inner = sorted(p.parents[1] for p in path.glob(f"*/{LEROBOT_INFO}"))
        hint = f" LeRobot datasets are in {', '.join(map(str, inner))}." if inner else ""
        raise UsageError(
            f"{path} holds no RLDS dataset, for there is no {INFO} in it or below it, and no LeRobot dataset, for "
            f"there is no {LEROBOT_INFO} in it.{hint}"
        )
    if len(found) > 1:
        raise UsageError(f"{path} holds several datasets; name one of {', '.join(map(str, found))}.")
    return found[0]


def dataset_folders(demos: DemoConfig) -> list[Path]:
    """The folders of the recorded datasets, each with a dataset; UsageError lists those that are missing."""
    root = Path(demos.path or "")
    if not demos.mixture:
        return [root]
    if not root.is_dir():
        raise UsageError(f"demos.path: {root} is not a directory: name the folder that holds the datasets.")
    datasets = parse_mixture(demos.mixture)
    if missing := [one.name for one in datasets if not (root / one.name).is_dir()]:
        there = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        raise UsageError(
            f"demos.mixture: {root} lacks {', '.join(missing)}; it has {', '.join(there) or 'no folders'}. Download "
            "them, or list those that you have as NAME:WEIGHT."
        )
    return [root / one.name for one in datasets]
