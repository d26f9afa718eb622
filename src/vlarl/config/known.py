"""Names that the configuration may use, kept here so that checking them loads no simulator and no model.

A test compares them with the packages they belong to.
"""

from __future__ import annotations

MAX_STEPS = {"tabletop_spatial": 32, "tabletop_object": 32, "tabletop_goal": 32, "tabletop_long": 64}
"""The suites there are, with the time limit of their episodes."""

KNOWN_SUITES = tuple(MAX_STEPS)
TASKS_PER_SUITE = 10
EVAL_STATES_PER_TASK = 20

BUILTIN_DECODERS = {"tiny-oft": "parallel", "tiny-openvla": "autoregressive"}
"""Sizes of the built-in policy and how each decodes; `builtin:` is the shipped checkpoint, `init:` fresh weights."""

BUILTIN_CHUNKS = {"tiny-oft": 4, "tiny-openvla": 1}
"""Actions that each predicts at once."""

BUILTIN_CAMERAS = 1
"""Views that the built-in policies read."""

KNOWN_REWARDS = ("sparse", "dense", "shaped", "rules", "model", "remote", "combined")

GROUP_METHODS = ("grpo", "rloo", "group_norm", "cpgd")
"""Algorithms that need groups of several episodes, which they compare with each other."""
