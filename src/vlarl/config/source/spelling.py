"""Translates other spellings of values to the schema's: `GRPO`, `libero_long`, `full-shard`.

Only unambiguous spellings are changed. All others are left for the schema to refuse.
"""

from __future__ import annotations

from collections.abc import Collection

from vlarl.config.describe import options
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.schema import Section

SUITE_NAMES = {"libero_long": "libero_10", "mt10": "metaworld_mt10", "mt50": "metaworld_mt50"}

SYNONYMS: dict[str, dict[str, object]] = {
    "algorithm.name": {
        "gae": "ppo",
        "reinforce++": "reinforce_pp",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
    },
    "algorithm.aggregate": {"seq_mean_token_mean": "sequence_mean", "sequence": "sequence_mean", "token": "token_mean"},
    "algorithm.ratio_level": {"token_level": "token", "action_level": "action", "chunk_level": "chunk"},
    "algorithm.normalize_advantages": {"true": "batch", "false": "none"},
    "distributed.sharding": {"full_shard": "full", "no_shard": "none", "hybrid_shard": "hybrid", "fsdp": "full"},
    "kl.estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "optim.schedule": {"constant_with_warmup": "constant"},
    "policy.dtype": {"bf16": "bfloat16", "fp32": "float32", "torch.bfloat16": "bfloat16", "torch.float32": "float32"},
    "policy.attention": {"flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2"},
    "vllm.sync_backend": {"gloo": "object_store"},
}
"""Values of other systems, by option, in lower case and with underscores."""

RECIPES: dict[str, dict[str, str]] = {
    "algorithm.name": {
        "gspo": "GSPO is --algorithm.name grpo --algorithm.ratio_level sequence --algorithm.aggregate sequence_mean",
        "dapo": "DAPO is --algorithm.name grpo --rollout.refill, with the default clip bounds and aggregate",
        "dr_grpo": "Dr. GRPO is --algorithm.name grpo --no-algorithm.normalize_std",
    },
    "policy.dtype": {"fp16": "use bfloat16", "float16": "use bfloat16"},
}
"""Values that vlarl does not have, and their counterparts (docs/algorithms.md)."""

SUITE_OPTIONS = ("env.suite", "env.suites", "demos.suites")


def suite_name(text: str) -> str:
    """A suite in vlarl's spelling: `LIBERO-Spatial` is libero_spatial, `libero_long` is libero_10."""
    name = _folded(text)
    return SUITE_NAMES.get(name) or _choice(text, KNOWN_SUITES)


def respelled(path: str, value: object, schema: type[Section]) -> object:
    """The value of an option in the spelling of the schema, if it is clear which one is meant."""
    option = options(schema).get(path)
    if option is None:
        return value
    if isinstance(value, tuple) and option.is_list:
        return tuple(_one(path, item, option.choices) for item in value)
    return _one(path, value, option.choices)


def recipe(path: str, value: object) -> str | None:
    """The counterpart, by other options, of a value that an option does not have; None for all other values."""
    folded = _folded(value).replace("_", "") if isinstance(value, str) else ""
    return next((text for name, text in RECIPES.get(path, {}).items() if name.replace("_", "") == folded), None)


def _one(path: str, value: object, choices: Collection[str]) -> object:
    if path in SUITE_OPTIONS:
        return suite_name(value) if isinstance(value, str) else value
    if isinstance(value, bool) and path in SYNONYMS:
        return SYNONYMS[path].get(str(value).lower(), value)
    if not isinstance(value, str) or not choices or value in choices:
        return value
    synonym = SYNONYMS.get(path, {}).get(_folded(value))
    return _choice(value, choices) if synonym is None else synonym


def _choice(text: str, choices: Collection[str]) -> str:
    """The choice that differs in case and hyphens only, or the text unchanged."""
    found = [choice for choice in choices if _folded(choice) == _folded(text)]
    return found[0] if len(found) == 1 else text


def _folded(text: str) -> str:
    return text.lower().replace("-", "_")
