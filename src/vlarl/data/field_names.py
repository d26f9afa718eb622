"""How fields of RLDS are named in LeRobot datasets and back.

steps/observation/image       observation.images.image      images
steps/observation/state       observation.state
steps/action                  action
steps/reward                  next.reward
steps/is_terminal             next.success
steps/language_instruction    the task
steps/is_first, is_last       not written: they follow from the episode's length
episode_metadata/…            columns of meta/episodes with the same names
"""

from __future__ import annotations

from vlarl.data.rlds.reader import STEPS

INSTRUCTION = f"{STEPS}language_instruction"
INSTRUCTIONS = (INSTRUCTION, f"{STEPS}observation/natural_language_instruction")
FIRST, LAST, TERMINAL = f"{STEPS}is_first", f"{STEPS}is_last", f"{STEPS}is_terminal"
EPISODE = "episode_metadata/"

_OBSERVATION, _CAMERAS = f"{STEPS}observation/", "observation.images."
_RENAMED = {f"{STEPS}reward": "next.reward", TERMINAL: "next.success"}


def feature_of(field: str, is_image: bool) -> str:
    """The name of an RLDS field of the steps in a LeRobot dataset."""
    if field in _RENAMED:
        return _RENAMED[field]
    if is_image and field.startswith(_OBSERVATION):
        return _CAMERAS + field.removeprefix(_OBSERVATION).replace("/", ".")
    return field.removeprefix(STEPS).replace("/", ".")


def field_of(feature: str, is_image: bool) -> str:
    """The inverse of `feature_of`."""
    for field, renamed in _RENAMED.items():
        if feature == renamed:
            return field
    if is_image and feature.startswith(_CAMERAS):
        return _OBSERVATION + feature.removeprefix(_CAMERAS).replace(".", "/")
    return STEPS + feature.replace(".", "/")
