"""Trajectories with the keys of their groups."""

from collections.abc import Sequence
from dataclasses import replace

from vlarl.types import Trajectory


def flat(*groups: Sequence[Trajectory], sizes: Sequence[int] = ()) -> list[Trajectory]:
    """The members of all groups in one list, each with its group's key; `sizes` are those of before members were lost."""
    sizes = sizes or [len(group) for group in groups]
    return [
        replace(trajectory, task=replace(trajectory.task, group=index, member=member, group_size=size))
        for index, (group, size) in enumerate(zip(groups, sizes, strict=True))
        for member, trajectory in enumerate(group)
    ]
