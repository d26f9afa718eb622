"""What the options of a command line go over: the preset or file that is named, or a preset that is chosen for them.

policy.path of full size, such as 7B ──► the preset of LIBERO, for PPO or for the others; what describes its own
                                         checkpoint is left out, as the files of the one that is named say it
policy.path of a small model         ──► the default preset, the toy
no policy.path                       ──► the preset of env.suite, where there is one; else the default preset
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlarl.config.known import CHECKPOINT_SERIES
from vlarl.config.paths import brief
from vlarl.config.presets import DEFAULT_PRESET, find_source, is_preset
from vlarl.config.run_checkpoints import is_small_checkpoint
from vlarl.config.schema import Config
from vlarl.config.spelling import respelled, suite_name
from vlarl.config.yaml_source import Document, read_document

FULL_SIZE, FULL_SIZE_PPO = "libero_spatial_grpo_oft", "libero_spatial_ppo_openvla"
"""What LIBERO and models of 7B start from: adapters, bfloat16, layers computed again; one GPU has room for that."""

OF_CHECKPOINT = ("decoder", "chunk_length", "num_images", "use_proprio")
"""Options of section policy in which a preset describes its own checkpoint."""

DECODER_NOTE = (
    "how the policy decodes is taken from its files, and those of an OpenVLA-OFT with action tokens don't say it: for "
    "one of them add --policy.decoder parallel"
)


@dataclass(frozen=True)
class Start:
    """A preset or file, and how it came to be the start."""

    source: str | Path
    reason: str  # `named on the command line`, or `chosen because …`
    left_out: tuple[str, ...] = ()  # options of the preset's policy: chosen for a checkpoint that they don't describe
    note: str = ""  # what else to know of the choice

    @property
    def label(self) -> str:
        """`preset tabletop_grpo`, `file mine.yaml`."""
        return f"preset {self.source}" if is_preset(self.source) else f"file {brief(self.source)}"

    @property
    def lines(self) -> list[str]:
        """What `--dry-run` says of it."""
        return [f"starts from the {self.label}, {self.reason}", *([self.note] if self.note else [])]


def start_of(source: str | Path | None, given: Mapping[str, object]) -> Start:
    """What these options go over."""
    if source is not None:
        return Start(source, "named on the command line")
    suite, path = given.get("env.suite"), given.get("policy.path")
    suite = suite_name(suite) if isinstance(suite, str) else ""
    is_ppo = respelled("algorithm.name", given.get("algorithm.name"), Config) == "ppo"
    full_size, by_algorithm = (FULL_SIZE_PPO, " and algorithm.name is ppo") if is_ppo else (FULL_SIZE, "")
    if isinstance(path, str):
        if is_small_checkpoint(path, str(given.get("run.root", Config().run.root))):
            return Start(DEFAULT_PRESET, "chosen because policy.path is a small model")
        reason = f"chosen because policy.path is taken for a 7B model{by_algorithm}"
        if path in CHECKPOINT_SERIES[full_size].values():
            return Start(full_size, reason)
        return Start(full_size, reason, OF_CHECKPOINT, "" if "policy.decoder" in given else DECODER_NOTE)
    if suite.startswith("libero_"):
        return Start(full_size, f"chosen because env.suite is {suite}{by_algorithm}")
    if suite == "metaworld_mt10":
        return Start("metaworld_grpo", f"chosen because env.suite is {suite}")
    return Start(DEFAULT_PRESET, "which is the default")


def read_start(start: Start, given: Mapping[str, object]) -> Document:
    """The content of the file; in another suite of LIBERO, a preset starts from the checkpoint made for that one."""
    document = read_document(find_source(start.source))
    policy, suite = document.data.get("policy"), given.get("env.suite")
    if not is_preset(start.source) or not isinstance(policy, dict):
        return document
    kept = {name: value for name, value in policy.items() if name not in start.left_out}
    series = next((series for series in CHECKPOINT_SERIES.values() if policy.get("path") in series.values()), {})
    if isinstance(suite, str) and (path := series.get(suite_name(suite))):
        kept["path"] = path
    document.data["policy"] = kept
    return document
