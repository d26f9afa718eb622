"""Names that the configuration may use, listed here so that checking them loads neither a simulator nor a model.

A test compares them with the packages that define them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SuiteFacts:
    """What is known about a suite without its simulator."""

    num_tasks: int
    max_steps: int | None  # None: the environment's own
    num_train_states: int = 30  # the first ones of a task's list
    num_eval_states: int = 20  # the ones after them
    num_benchmark_states: int = 50  # the last ones of all
    demos_from_fresh_states: bool = True  # demonstrations begin from states outside these lists
    extra: str | None = None  # of the package, which installs its simulator
    in_processes: bool = True  # each environment is its own process
    has_dense_reward: bool = False
    process_mib: int | None = None  # memory of one process, as measured; None: no process, or not known
    are_states_known: bool = True  # False: the states are the rows of the user's data, counted when they are read


_TABLETOP = {"tabletop_spatial": 32, "tabletop_object": 32, "tabletop_goal": 32, "tabletop_long": 64}
_LIBERO = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
_METAWORLD = {
    "metaworld_mt10": 10,
    "metaworld_mt25": 25,
    "metaworld_mt50": 50,
    "metaworld_ml10": 10,
    "metaworld_ml10_test": 5,
    "metaworld_ml25": 25,
    "metaworld_ml25_test": 5,
    "metaworld_ml45": 45,
    "metaworld_ml45_test": 5,
}
_PROMPTS = {"prompts_arithmetic": (4, 800, 200), "prompts_shapes": (5, 4000, 200)}  # tasks, states to train, evaluate

SUITES: dict[str, SuiteFacts] = (
    {
        name: SuiteFacts(10, limit, num_benchmark_states=20, in_processes=False, has_dense_reward=True)
        for name, limit in _TABLETOP.items()
    }
    | {
        name: SuiteFacts(
            90 if name == "libero_90" else 10, limit, extra="libero", demos_from_fresh_states=False, process_mib=600
        )
        for name, limit in _LIBERO.items()
    }
    | {
        name: SuiteFacts(num_tasks, 500, extra="metaworld", has_dense_reward=True, process_mib=500)
        for name, num_tasks in _METAWORLD.items()
    }
    | {
        name: SuiteFacts(num_tasks, 1, train, held_out, held_out, in_processes=False)
        for name, (num_tasks, train, held_out) in _PROMPTS.items()
    }
)
"""The suites that vlarl knows by name. `gym` and `prompts` are described by the configuration itself."""


BATCHED_ENVS = 64
"""Default of env.num_envs for environments that don't run in processes: tabletops, batched ones."""

GYM = "gym"
PROMPTS = "prompts"
KNOWN_SUITES = (*SUITES, GYM, PROMPTS)


def is_prompts(suite: str) -> bool:
    """Whether a suite consists of prompts, which are responded to with a text."""
    return suite == PROMPTS or suite in _PROMPTS


@dataclass(frozen=True)
class BuiltinFacts:
    """What is known of a checkpoint that ships with vlarl, without loading it."""

    home: str  # how the names of the suites begin that it was trained on
    decoder: str | None = None  # of OpenVLA
    chunk_length: int | None = None  # actions that it predicts at once
    num_views: int = 1
    is_flow: bool = False


BUILTINS = {
    "tiny-oft": BuiltinFacts("tabletop_", "parallel", 4),
    "tiny-openvla": BuiltinFacts("tabletop_", "autoregressive", 1),
    "tiny-smolvla": BuiltinFacts("tabletop_", None, 4, is_flow=True),
    "tiny-qwen2.5-vl": BuiltinFacts("prompts_"),
}
"""Checkpoints `builtin:<name>`."""

FRESH_DECODERS = {"tiny-oft": "parallel", "tiny-openvla": "autoregressive", "small-oft": "parallel"}
"""How OpenVLA policies decode that `init:<name>` gives fresh weights."""

FRESH_FLOWS = ("tiny-smolvla",)
"""Flow policies that it gives fresh weights."""

FRESH_NAMES = (*FRESH_DECODERS, *FRESH_FLOWS)
"""Policies of robots that `init:<name>` gives fresh weights."""


def decoder_of(path: str) -> str | None:
    """How a built-in or fresh OpenVLA decodes; None for any other policy."""
    kind, _, name = path.partition(":")
    if kind == "init":
        return FRESH_DECODERS.get(name)
    return BUILTINS[name].decoder if kind == "builtin" and name in BUILTINS else None


def is_known_flow(path: str) -> bool:
    """Whether a built-in or fresh policy is a flow policy."""
    kind, _, name = path.partition(":")
    return name in FRESH_FLOWS if kind == "init" else name in BUILTINS and BUILTINS[name].is_flow


def views_of(path: str) -> int | None:
    """How many views a built-in policy reads, or a fresh one by default; None for any other policy."""
    kind, _, name = path.partition(":")
    facts = BUILTINS.get(name) if kind == "builtin" else None
    return facts.num_views if facts else 1 if kind in ("builtin", "init") else None


TABLETOP_IMAGE_SIZE = 56
"""Side length in pixels of the images that built-in policies of the tabletop read."""

TEXT_REWARDS = ("exact_match", "number_match", "choice", "format", "length", "overlong")
"""Rewards that score a text."""

KNOWN_REWARDS = ("sparse", "dense", "shaped", "rules", "model", "remote", *TEXT_REWARDS, "combined")

EXPERTS = "experts"
"""ptx.path: demonstrations of the suite's scripted experts."""

GROUP_METHODS = ("grpo", "rloo", "group_norm", "cpgd")
"""Algorithms that compare the episodes of a group with each other."""

CHECKPOINT_SERIES: dict[str, dict[str, str]] = {
    "libero_spatial_grpo_oft": {
        "libero_spatial": "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1",
        "libero_object": "Haozhan72/Openvla-oft-SFT-libero-object-traj1",
        "libero_goal": "Haozhan72/Openvla-oft-SFT-libero-goal-traj1",
        "libero_10": "Haozhan72/Openvla-oft-SFT-libero10-traj1",
    },
    "libero_spatial_ppo_openvla": {
        "libero_spatial": "openvla/openvla-7b-finetuned-libero-spatial",
        "libero_object": "openvla/openvla-7b-finetuned-libero-object",
        "libero_goal": "openvla/openvla-7b-finetuned-libero-goal",
        "libero_10": "openvla/openvla-7b-finetuned-libero-10",
    },
}
"""Published checkpoints of one recipe, one for each suite, by the preset that starts from them."""
