"""The built-in tabletop world; importing it registers its Gymnasium ids."""

from vlarl.envs.base import ExpertFlaws
from vlarl.envs.tabletop.env import TabletopEnv, TabletopVectorEnv, register_tabletop
from vlarl.envs.tabletop.expert import IMPERFECT, PERFECT, ScriptedExpert
from vlarl.envs.tabletop.pool import TabletopPool
from vlarl.envs.tabletop.tasks import SUITES

__all__ = [
    "IMPERFECT",
    "PERFECT",
    "SUITES",
    "ExpertFlaws",
    "ScriptedExpert",
    "TabletopEnv",
    "TabletopPool",
    "TabletopVectorEnv",
    "register_tabletop",
]

register_tabletop()
