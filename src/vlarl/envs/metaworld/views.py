"""Camera poses.

Meta-World's own cameras are far away: at 64 pixels a goal marker of 4 cm is a pixel or two. The agent's camera is
nearer, in one of two poses.

    front   opposite the robot, for tasks on the open table. No arm hides the marker; and the direction that a single
            image shows poorly, towards the camera, is the one in which the hand approaches.
    side    over the robot's right shoulder, for tasks with something built on the table, which faces the robot.

`exact_pixels` keeps Meta-World's cameras.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlarl.config.schema import Camera


@dataclass(frozen=True)
class FixedView:
    """A camera of the model."""

    camera: str
    upside_down: bool = False  # Meta-World's corner cameras hang from the ceiling


@dataclass(frozen=True)
class OrbitView:
    """A camera that looks at a point from a distance, in metres and degrees."""

    lookat: tuple[float, float, float]
    distance: float
    azimuth: float  # viewing direction: 0 along x, 90 along y
    elevation: float  # negative: down
    fovy: float


View = FixedView | OrbitView

FRONT = OrbitView(lookat=(0.0, 0.7, 0.12), distance=0.85, azimuth=270.0, elevation=-38.0, fovy=45.0)
SIDE = OrbitView(lookat=(0.0, 0.68, 0.12), distance=1.05, azimuth=145.0, elevation=-32.0, fovy=45.0)
STOCK = FixedView("corner4", upside_down=True)
"""Where VLA papers place Meta-World's corner2."""

WRIST = FixedView("gripperPOV")

OPEN_TABLE = frozenset(
    {
        *("reach-v3", "push-v3", "push-back-v3", "pick-place-v3", "pick-out-of-hole-v3"),
        *("hand-insert-v3", "sweep-v3", "sweep-into-v3"),
    }
)
"""Tasks with nothing on the table that could block the view from the front."""


def view_of(env_name: str, camera: Camera, exact_pixels: bool) -> View:
    """The pose of a task's camera."""
    if camera == "wrist":
        return WRIST
    if exact_pixels:
        return STOCK
    return FRONT if env_name in OPEN_TABLE else SIDE
