"""Merging: an adapter and its base -> one checkpoint folder in the original layout, checked on a probe.

adapter + base, float32 ──► logits ─┐
  fold the adapters in     ──► logits ─┴─ equal?  ──► write ──► read back ──► the same logits? ──► OUT
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from vlarl import __version__
from vlarl.config.run_checkpoints import FINAL, HUB_ID, locate_checkpoint
from vlarl.errors import UsageError, VlarlError
from vlarl.policies import adapters
from vlarl.policies.base import Policy
from vlarl.policies.checkpoint_json import read_json, write_json
from vlarl.policies.load import DTYPES, checkpoint_folder, load_policy
from vlarl.policies.weight_files import MAX_SHARD_BYTES, stored_dtype

log = logging.getLogger(__name__)

METADATA = "merge_metadata.json"
MERGED = "merged"  # beside a run's final checkpoint
ENOUGH_KEPT = 0.95  # of an adapter; below that a merge warns
TOLERANCE = 1e-4  # of a float32 logit, between adapter and merged model
PACKAGES = ("torch", "transformers", "peft", "safetensors")

# Files of a base that belong to its model and contain no weights, including the original's code.
COPIED = ("*.json", "*.py", "*.txt", "*.jinja", "tokenizer.model")


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    out: Path
    base: str
    dtype: str
    logit_error: float  # largest difference between adapter and merged model, both float32
    rounding_error: float  # what storing in a lower precision adds to that; 0 for float32
    fraction_kept: float  # of the adapter's weights, after storing in that type

    @property
    def warning(self) -> str | None:
        """The warning about an adapter that the type of the merged weights can't represent; None if it can."""
        if self.fraction_kept >= ENOUGH_KEPT:
            return None
        return (
            f"only {self.fraction_kept:.0%} of the adapter is left in {self.dtype} weights, which can't hold changes "
            "this small: merge with --dtype float32, or use the adapter as it is."
        )


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    device: torch.device | str = "cpu",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> MergeResult:
    """Merge an adapter into its base and write the whole model to the new folder `out`.

    `base` is needed if the path recorded in the adapter is no longer valid; `dtype` defaults to the base's.
    """
    target = Path(out).resolve()
    refuse_used(target)
    adapter = locate_checkpoint(adapter).path
    folder = checkpoint_folder(adapter)
    if not adapters.is_adapter(folder):
        raise UsageError(
            f"{adapter} holds no adapter (adapter_config.json), so there is nothing to merge: it is a whole checkpoint "
            f"already, which can be used as it is, such as by: vlarl eval {adapter}"
        )
    policy = load_policy(adapter, base=base, device=device)
    assert policy.base is not None
    origin, chosen = policy.base, DTYPES[dtype] if dtype else stored_dtype(policy.base.folder)
    lora = adapters.settings(policy.model)
    before = policy.probe_logits()
    kept = adapters.fraction_kept(policy.model, chosen)
    policy.fold_adapter()
    merged = policy.probe_logits()
    error = check_equal(before, merged, f"folding {adapter} into {origin.path}", TOLERANCE)
    fresh = target.with_name(f".new-{target.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        copy_files(origin.folder, fresh)
        policy.save_merged(fresh, folder, chosen, max_shard_bytes)
        update_config(fresh, origin.path, _name(chosen))
        round_weights(policy, chosen)
        stored = policy.probe_logits()
        del policy  # two float32 models may not fit in memory
        reread = load_policy(fresh, device=device)
        check_equal(stored, reread.probe_logits(), f"reading back {target}", TOLERANCE)
        rounding = float((stored - merged).abs().max())
        result = MergeResult(target, origin.path, _name(chosen), error, rounding, kept)
        write_json(fresh / METADATA, metadata(result, adapter, lora))
        if target.exists():
            target.rmdir()  # empty, as was checked
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return result


def merge_final(checkpoints: Path) -> MergeResult | None:
    """Write the final checkpoint of a run once more, merged, beside it; None where it is whole already.

    What an earlier part of the same run left there is replaced.
    """
    final, merged = checkpoints / FINAL, checkpoints / MERGED
    if not adapters.is_adapter(final):
        return None
    shutil.rmtree(merged, ignore_errors=True)
    result = merge(final, merged)
    if result.warning is not None:
        log.warning("%s: %s", merged, result.warning)
    return result


def refuse_used(folder: Path) -> None:
    """Refuse a folder that is not empty: a merge never overwrites."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty, and nothing is overwritten: name a new folder.")


def round_weights(policy: Policy, dtype: torch.dtype) -> None:
    """Round the model's weights to the values that they have when stored in this type."""
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.to(dtype).float()


def check_equal(before: torch.Tensor, after: torch.Tensor, what: str, tolerance: float) -> float:
    """The largest difference of two sets of logits; more than the tolerance aborts the merge."""
    error = float((before - after).abs().max())
    if not error <= tolerance:  # a NaN aborts it, too
        raise VlarlError(
            f"{what} changes the logits by {error:.1e}, more than {tolerance:.0e}: nothing was written. Check that the "
            "adapter's weights are finite and of the size that training leaves."
        )
    return error


def copy_files(source: Path, target: Path) -> None:
    """Copy the base's processor, tokenizer, statistics and code, but not its weights, which the merge writes."""
    skipped = {METADATA, "model.safetensors.index.json", "trainer.json", "metadata.json"}
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.name not in skipped:
                shutil.copyfile(path, target / path.name)


def update_config(folder: Path, base: str, dtype: str) -> None:
    """Set the precision of the weights in config.json, and the location of the code of a hub's base, if not copied."""
    config = read_json(folder / "config.json")
    config["torch_dtype"] = dtype
    hub_id = HUB_ID.fullmatch(base)
    for name, reference in config.get("auto_map", {}).items():
        module = f"{reference.rpartition('--')[2].partition('.')[0]}.py"
        if hub_id is not None and not (folder / module).is_file():
            config["auto_map"][name] = f"{hub_id['repo']}--{reference.rpartition('--')[2]}"
    write_json(folder / "config.json", config)


def metadata(result: MergeResult, adapter: str | Path, lora: dict[str, object]) -> dict[str, object]:
    """The content of merge_metadata.json."""
    return {
        "base": result.base,
        "adapter": str(adapter),
        "lora": lora,
        "dtype": result.dtype,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "max_logit_difference": result.logit_error,
        "max_rounding_difference": result.rounding_error,
        "adapter_fraction_kept": result.fraction_kept,
        "versions": {"vlarl": __version__} | {name: version(name) for name in PACKAGES},
    }


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)
