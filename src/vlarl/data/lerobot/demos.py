"""Episodes of a LeRobot dataset as demonstrations, by a mapping or by the usual names of its features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from vlarl.config.finetune import DemoConfig, Gripper
from vlarl.data.lerobot.declared import FILE, SUCCESS, gripper_parts
from vlarl.data.lerobot.info import TASK
from vlarl.data.lerobot.mapped import MappedDataset
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.rlds.declared import OPTION, check_option, declared_mappings, is_file
from vlarl.data.rlds.mapping import VIEWS, Mapping, Part
from vlarl.data.rlds.ready import READY
from vlarl.errors import UsageError


class LeRobotSource(RecordedSource):
    """A LeRobot dataset, in as many of its views as a policy reads."""

    def __init__(
        self, config: DemoConfig, path: str, num_images: int, option: str = "demos.path", image_size: int = 224
    ) -> None:
        """`option` names the path in messages; `image_size` is that of views which are resized."""
        dataset = LeRobotDataset(path)
        name = config.dataset_name or dataset.name
        mapping = _named_mapping(config, name) or _usual_mapping(dataset, config.gripper, option)
        mapping = _in_lerobots_names(mapping, dataset)
        super().__init__(config, MappedDataset(dataset), mapping, num_images, option, image_size, name)


def _named_mapping(config: DemoConfig, name: str) -> Mapping | None:
    """The mapping that demos.mapping names for a dataset; None without one."""
    option = config.mapping
    check_option(option)
    if option is None:
        return None
    if not is_file(option):
        return READY[option]
    declared = declared_mappings(Path(option))
    if name not in declared and not config.mixture:  # a file may be for other datasets of a mixture
        raise UsageError(f"{OPTION}: {option} declares {', '.join(declared)}, but not {name}: add it as {name}.")
    return declared.get(name)


def _usual_mapping(dataset: LeRobotDataset, given: Gripper | None, option: str) -> Mapping:
    """What features with the usual names mean, or those that meta/vlarl.json names."""
    roles = dataset.declared.roles(dataset.fields)

    def refused(reason: str, remedy: str) -> UsageError:
        known = ", ".join(dataset.info.own_features)
        return UsageError(f"{option}: {dataset.folder}: {reason}: {remedy}. Its features are {known}.")

    if roles.action is None or roles.state is None:
        meaning = "the action" if roles.action is None else "the robot's state"
        raise refused(f"no feature is known as {meaning}", "declare it with demos.mapping (docs/data.md)")
    gripper = given or dataset.declared.gripper
    if gripper is None:
        grippers = np.concatenate([one.values(roles.action).reshape(len(one), -1)[:, -1] for one in dataset])
        raise refused(
            f"the dataset does not say what its gripper means, whose values are {grippers.min():.3g} to "
            f"{grippers.max():.3g}",
            f"declare it with demos.gripper, one of {', '.join(get_args(Gripper))} (LIBERO's is closed_is_1), with "
            f'demos.mapping, or with {{"gripper": …}} in its {FILE}',
        )
    views = dict(zip(VIEWS, roles.views, strict=False))
    return Mapping(
        action=gripper_parts(roles.action, gripper),
        state=(Part(roles.state),),
        primary=views.get("primary"),
        wrist=views.get("wrist"),
        secondary=views.get("secondary"),
        gripper_is_absolute=None,
    )


def _in_lerobots_names(mapping: Mapping, dataset: LeRobotDataset) -> Mapping:
    """A mapping whose defaults are the names that LeRobot has for instruction and success."""
    fields = dataset.fields
    if mapping.instruction == Mapping.instruction and mapping.instruction not in fields:
        mapping = replace(mapping, instruction=TASK)
    if mapping.success == Mapping.success and mapping.success not in fields:
        mapping = replace(mapping, success=SUCCESS if SUCCESS in fields else None)
    return mapping
