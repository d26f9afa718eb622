"""A reward that reads the images of an episode."""

from vlarl.types import Trajectory


def brightness(trajectory: Trajectory) -> float:
    """The mean of the last image, from 0 to 1."""
    return float(trajectory.final_observation.images.mean()) / 255
