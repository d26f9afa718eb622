"""The base of a command line's options: the preset or file that is named, or a preset that is chosen for them.

policy.path of full size, such as 7B ──► the LIBERO preset, for PPO or for the others, without the options that
                                         describe its own checkpoint: the named checkpoint's files have them
policy.path of a small model         ──► the preset of env.suite for built-in prompts; else the default preset
no policy.path                       ──► the preset of env.suite, if there is one; else the default preset
rollout.num_steps, no algorithm.name ──► as with algorithm.name ppo, which alone can learn from it
env.suite prompts, your own data     ──► the preset for prompts and models of 3B, as for large models on other prompts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vlarl.config.known import CHECKPOINT_SERIES, GROUP_METHODS, is_prompts
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import is_small_checkpoint
from vlarl.config.schema import Config
from vlarl.config.source.presets import DEFAULT_PRESET, find_source, is_preset
from vlarl.config.source.spelling import respelled, suite_name
from vlarl.config.source.yaml_file import Document, read_document

FULL_SIZE, FULL_SIZE_PPO = "libero_spatial_grpo_oft", "libero_spatial_ppo_openvla"
"""Presets for LIBERO and 7B models: adapters, bfloat16, gradient checkpointing; they fit on one GPU."""

DEFAULT_PPO = "tabletop_ppo"
"""The preset of the tabletop whose options fit rollouts of a fixed length: without groups."""

PROMPTS_PPO = "prompts_ppo"
PROMPTS_GRPO = {"prompts_shapes": "prompts_grpo", "prompts_arithmetic": "prompts_arithmetic_grpo"}
"""Presets of the built-in prompts."""

PROMPTS_POLICY = "builtin:tiny-qwen2.5-vl"
"""The model that they train."""

PROMPTS_FULL_SIZE = "prompts_grpo_3b"
"""The preset for prompts and models of a few billion parameters: long texts, adapters; it is for one GPU."""

OF_FULL_SIZE = ("policy.dtype", "policy.gradient_checkpointing")
"""Options by which such a model fits on a GPU."""

OF_CHECKPOINT = ("policy.decoder", "policy.chunk_length", "policy.num_images", "policy.use_proprio")
"""Options in which a preset describes its own checkpoint."""

OF_LIBERO = ("policy.resize", "policy.center_crop")
"""Options that describe the images of LIBERO's demonstrations."""

OF_GROUPS = ("rollout.refill", "rollout.accuracy_bounds")
"""Options that only methods with groups read."""

DECODER_NOTE = (
    "the decoder is read from the policy's files, which don't name it for an OpenVLA-OFT with action tokens: for such "
    "a checkpoint add --policy.decoder parallel"
)


@dataclass(frozen=True)
class Start:
    """A preset or file, and why it was chosen as the base."""

    source: str | Path
    reason: str  # `named on the command line`, or `chosen because …`
    left_out: tuple[str, ...] = ()  # options of the preset that don't fit what it was chosen for
    note: str = ""  # a further remark on the choice

    @property
    def label(self) -> str:
        """`preset tabletop_grpo`, `file mine.yaml`."""
        return f"preset {self.source}" if is_preset(self.source) else f"file {brief(self.source)}"

    @property
    def lines(self) -> list[str]:
        """The lines that `--dry-run` prints about it."""
        return [f"starts from the {self.label}, {self.reason}", *([self.note] if self.note else [])]


def start_of(source: str | Path | None, given: Mapping[str, object]) -> Start:
    """The base of these options."""
    if source is not None:
        return Start(source, "named on the command line")
    suite, path = _suite(given), given.get("policy.path")
    algorithm = respelled("algorithm.name", given.get("algorithm.name"), Config)
    is_ppo, by_algorithm, default = _method(algorithm, given)
    full_size = FULL_SIZE_PPO if is_ppo else FULL_SIZE
    is_small = isinstance(path, str) and is_small_checkpoint(path, str(given.get("run.root", Config().run.root)))
    if suite in PROMPTS_GRPO and (path is None or is_small):
        preset = PROMPTS_PPO if is_ppo else PROMPTS_GRPO[suite]
        return Start(preset, f"chosen because env.suite is {suite}{by_algorithm}")
    if not suite and path == PROMPTS_POLICY:
        preset = PROMPTS_PPO if is_ppo else PROMPTS_GRPO["prompts_shapes"]
        return Start(preset, f"chosen because policy.path is the built-in model for prompts{by_algorithm}")
    if is_prompts(suite):
        return Start(PROMPTS_FULL_SIZE, f"chosen because env.suite is {suite}", OF_FULL_SIZE if is_small else ())
    left_out: tuple[str, ...] = () if algorithm in (None, "ppo", *GROUP_METHODS) else OF_GROUPS
    if isinstance(path, str):
        if is_small:
            return replace(default, reason="chosen because policy.path is a small model")
        reason = f"chosen because policy.path is taken for a 7B model{by_algorithm}"
        if path in CHECKPOINT_SERIES[full_size].values():
            return Start(full_size, reason, left_out)
        left_out += OF_CHECKPOINT if not suite or suite.startswith("libero_") else OF_CHECKPOINT + OF_LIBERO
        return Start(full_size, reason, left_out, "" if "policy.decoder" in given else DECODER_NOTE)
    if suite.startswith("libero_"):
        return Start(full_size, f"chosen because env.suite is {suite}{by_algorithm}", left_out)
    if suite == "metaworld_mt10":
        return Start("metaworld_grpo", f"chosen because env.suite is {suite}")
    return default


def _method(algorithm: object, given: Mapping[str, object]) -> tuple[bool, str, Start]:
    """Whether the preset is to be one of PPO, why, and the start if nothing else decides on it."""
    if algorithm in (None, "ppo") and given.get("rollout.num_steps") is not None:
        why = "rollout.num_steps is set, for ppo"
        return True, f" and {why}", Start(DEFAULT_PPO, f"chosen because {why}")
    is_ppo = algorithm == "ppo"
    return is_ppo, " and algorithm.name is ppo" if is_ppo else "", Start(DEFAULT_PRESET, "which is the default")


def _suite(given: Mapping[str, object]) -> str:
    """The given suite, or the first of several; empty if none is given."""
    several = given.get("env.suites")
    suite = given.get("env.suite") or (several[0] if isinstance(several, list | tuple) and several else None)
    return suite_name(suite) if isinstance(suite, str) else ""


def read_start(start: Start, given: Mapping[str, object]) -> Document:
    """The content of the file; with another LIBERO suite, a preset starts from the checkpoint for that suite."""
    document = read_document(find_source(start.source))
    policy, suite = document.data.get("policy"), _suite(given)
    if not is_preset(start.source) or not isinstance(policy, dict):
        return document
    for option in start.left_out:
        section, _, name = option.partition(".")
        if isinstance(content := document.data.get(section), dict):
            content.pop(name, None)
    series = next((series for series in CHECKPOINT_SERIES.values() if policy.get("path") in series.values()), {})
    if path := series.get(suite):
        policy["path"] = path
    return document
