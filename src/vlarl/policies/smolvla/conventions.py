"""How a SmolVLA is used, beyond what lerobot's files say; a part of it is kept beside the weights, in vlarl.json.

policy.gripper, .state_dims, .num_images ──► vlarl.json of a saved folder ──► what holds by default where it is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vlarl.config.training_data import TrainingData
from vlarl.errors import UsageError
from vlarl.policies.flow import Denoising
from vlarl.types import FloatArray

FILE_NAME = "vlarl.json"
FORMAT = 1
TABLETOP = "tabletop"  # its suites, and the dataset of their demonstrations, have names that begin so

Name = Annotated[str, Field(max_length=4096)]


class StoredConventions(BaseModel):
    """`{"format": 1, "gripper": "signed", "state_dims": null, "num_images": 1, "statistics": ["libero_spatial"]}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    gripper: Literal["same", "signed"] = "same"
    state_dims: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    num_images: Annotated[int, Field(gt=0)] | None = None  # of the views; None: all
    statistics: tuple[Name, ...] = ()  # the datasets that they are of, as far as that is known


@dataclass(frozen=True)
class Conventions:
    """How the policy is used, beyond what its checkpoint says."""

    denoising: Denoising
    num_steps: int  # actions of a chunk that are executed
    critic: Literal["vlm", "expert"] = "vlm"  # whose state the critic reads
    gripper: Literal["same", "signed"] = "same"  # signed: -1 opens, 1 closes; same: as the suite has it

    def flips_gripper(self, suites: Sequence[str]) -> bool:
        """Whether the gripper of the policy's actions is not that of these suites. Most have 1 to open and 0 to close;
        the tabletop closes at 1 and opens at -1 and 0, as a signed gripper does."""
        kinds = {suite.startswith(TABLETOP) for suite in suites}
        if self.gripper == "same":
            return False
        if len(kinds) > 1:
            raise UsageError(
                f"policy.gripper = 'signed' with the suites {', '.join(suites)}: 1 closes the gripper of some "
                "and opens that of others; name suites of one robot."
            )
        return True not in kinds


def read_stored(folder: Path, data: TrainingData | None) -> StoredConventions:
    """From a checkpoint's folder; without the file, the statistics are those of the demonstrations in `data`."""
    path = folder / FILE_NAME
    if not path.is_file():
        runs = () if data is None else (run.suite for run in data.runs if run.by == "finetune")
        return StoredConventions(
            statistics=tuple(dict.fromkeys(TABLETOP if suite.startswith(TABLETOP) else suite for suite in runs))
        )
    try:
        return StoredConventions.model_validate_json(path.read_bytes())
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        raise ValueError(
            f"{path} does not say how the policy is used ({where}: {detail['msg']}): copy it again, or delete it and "
            "set policy.gripper, policy.state_dims and policy.num_images"
        ) from error


def to_signed(gripper: FloatArray) -> FloatArray:
    """1 (open) and 0 (closed) as -1 and 1."""
    return 1.0 - 2.0 * gripper


def from_signed(gripper: FloatArray) -> FloatArray:
    """-1 (open) and 1 (closed) as 1 and 0."""
    return (1.0 - gripper) / 2.0


MIRRORED = {"min": "max", "max": "min", "q01": "q99", "q99": "q01", "q10": "q90", "q90": "q10"}


def signed_statistics(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of actions whose gripper `to_signed` has converted."""
    converted: dict[str, Any] = dict(columns)
    for name, values in columns.items():
        if name == "std":
            converted[name] = [*values[:-1], 2.0 * values[-1]]
        elif name == "mean" or name in MIRRORED:
            source = columns[MIRRORED.get(name, name)]
            converted[name] = [*values[:-1], 1.0 - 2.0 * source[-1]]
    return converted
