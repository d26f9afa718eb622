"""What MuJoCo has to say goes to the log. By itself it writes MUJOCO_LOG.TXT into whatever folder the program is in."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def log_warnings() -> None:
    """Send MuJoCo's warnings to the log, where MuJoCo is loaded; to be called before a simulator runs."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_warn)


def _warn(message: str) -> None:
    log.warning("MuJoCo: %s", message)
