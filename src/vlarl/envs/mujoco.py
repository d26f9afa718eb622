"""Sends MuJoCo's warnings to the log. By default MuJoCo writes MUJOCO_LOG.TXT to the working directory."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def log_warnings() -> None:
    """Send MuJoCo's warnings to the log if MuJoCo is loaded; call this before a simulator runs."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_warn)


def _warn(message: str) -> None:
    log.warning("MuJoCo: %s", message)
