"""What a LeRobot dataset does not say of itself: the suite's name, the gripper's convention, what its features mean.

vlarl writes it to meta/vlarl.json, which lerobot ignores. For datasets of other programs it is declared by options, or
by the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from vlarl.config.finetune import Gripper
from vlarl.config.known import SUITES
from vlarl.data.lerobot.info import json_object, malformed
from vlarl.data.recorded import Roles
from vlarl.data.rlds.features import Field
from vlarl.data.rlds.mapping import Part
from vlarl.data.rlds.ready import NO_NOOPS
from vlarl.data.rlds.transforms import TRANSFORMS
from vlarl.types import FloatArray

FILE = "meta/vlarl.json"

# Names in the datasets that are on the hub, LIBERO's first.
AGENT_VIEWS = (
    "observation.images.image",
    "observation.images.agent",
    "observation.images.agentview",
    "observation.image",
)
WRIST_VIEWS = ("observation.images.wrist_image", "observation.images.image2", "observation.images.wrist")
STATES, ACTIONS = ("observation.state", "state"), ("action", "actions")
# The transforms of a recorded gripper to the policy's, in which 1 is open and 0 closed.
GRIPPERS: dict[Gripper, tuple[str, ...]] = {
    "closed_is_1": ("clip", "invert"),
    "open_is_1": ("clip",),
    "as_recorded": (),
}
SUCCESS, REWARD, DONE = "next.success", "next.reward", "next.done"


@dataclass(frozen=True)
class Declared:
    """What is declared; None where nothing is."""

    name: str | None = None
    gripper: Gripper | None = None
    views: tuple[str, ...] | None = None  # the agent's view first
    state: str | None = None
    action: str | None = None

    def to_json(self) -> dict[str, object]:
        """The content of meta/vlarl.json."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def roles(self, fields: Mapping[str, Field]) -> Roles:
        """The features that a policy reads: those declared, else those with usual names."""

        def first(names: tuple[str, ...]) -> str | None:
            return next((name for name in names if name in fields), None)

        cameras = [name for name, field in fields.items() if field.kind == "image"]
        agent, wrist = first(AGENT_VIEWS), first(WRIST_VIEWS)
        usual = tuple(name for name in (agent, wrist) if name is not None) if agent else ()
        if not usual and len(cameras) == 1:
            usual = (cameras[0],)
        return Roles(
            views=self.views or usual,
            state=self.state or first(STATES),
            action=self.action or first(ACTIONS),
            instruction="task",
        )


def read_declared(folder: Path) -> Declared:
    """What meta/vlarl.json says; nothing without the file."""
    path = folder / FILE
    if not path.exists():
        return Declared()
    content = json_object(path)
    if unknown := sorted(set(content) - set(Declared.__dataclass_fields__)):
        raise malformed(
            path, f"{', '.join(unknown)} is not known; known are {', '.join(Declared.__dataclass_fields__)}"
        )
    views = content.get("views")
    texts = [content.get(name) for name in ("name", "state", "action")] + (views if isinstance(views, list) else [])
    if any(text is not None and not isinstance(text, str) for text in texts) or not isinstance(views, list | None):
        raise malformed(path, "name, state and action are texts, views a list of texts")
    if content.get("gripper") not in (None, *get_args(Gripper)):
        raise malformed(path, f"gripper is one of {', '.join(get_args(Gripper))}")
    return Declared(**{**content, "views": None if views is None else tuple(views)})


def suite_gripper(name: str) -> Gripper | None:
    """What the gripper means in recordings of a suite that vlarl knows."""
    suite = name.removesuffix(NO_NOOPS)
    if suite not in SUITES:
        return None
    return "closed_is_1" if suite.startswith("libero") else "as_recorded"


def gripper_parts(action: str, convention: Gripper) -> tuple[Part, ...]:
    """The parts of a policy's action, whose last dimension is the gripper."""
    through = GRIPPERS[convention]
    return (Part(action, 0, -1), Part(action, -1, None, through)) if through else (Part(action),)


def policy_gripper(convention: Gripper, actions: FloatArray) -> FloatArray:
    """[N, D] recorded actions in the policy's convention."""
    if convention == "as_recorded":
        return actions
    gripper = actions[:, -1:]
    for name in GRIPPERS[convention]:
        gripper = TRANSFORMS[name](gripper)
    converted: FloatArray = np.concatenate([actions[:, :-1], gripper], axis=1).astype(np.float32)
    return converted
