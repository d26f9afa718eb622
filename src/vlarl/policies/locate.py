"""Where checkpoints are: built-in names, folders and hub ids -> the folder on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.presets import presets_of
from vlarl.config.run_checkpoints import ACCEPTED, locate_checkpoint, refuse_unknown
from vlarl.config.training_data import FILE_NAME, TrainingData, read_training_data
from vlarl.errors import UsageError

BUILTIN = {"builtin:tiny-oft": "tiny-oft", "builtin:tiny-openvla": "tiny-openvla"}
"""Checkpoints that ship with vlarl, and their folders in the package."""

HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\S+))?", re.ASCII)
"""`organisation/name`, and `@revision` (a branch, a tag or a commit) where it is not the main branch."""

# What a checkpoint is made of. Neither pickled weights nor the repository's code is ever fetched.
WANTED = ["*.json", "*.safetensors", "*_checkpoint.pt", "tokenizer.model", "*.txt"]
UNWANTED = ["*/*"]  # subfolders: other formats, adapters that are merged already, logs

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def checkpoint_folder(path: str | Path) -> Path:
    """The folder behind a built-in name, a path, a run or a hub id, which is downloaded into the hub's cache."""
    path = locate_checkpoint(path).path
    if str(path) in BUILTIN:
        return Path(str(files("vlarl.policies") / "builtin" / BUILTIN[str(path)]))
    folder = Path(path).expanduser()
    if not folder.is_dir():
        hub_id = HUB_ID.fullmatch(str(path))
        refuse_unknown(str(path))
        if hub_id is None or _looks_local(str(path), hub_id):
            raise _not_a_checkpoint(path, "there is no such folder")
        folder = _download(hub_id["repo"], hub_id["revision"])
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise _not_a_checkpoint(path, "it holds no config.json")
    return folder


def hub_training_data(path: str) -> TrainingData | None:
    """What a checkpoint of the hub says that it was trained on, before its weights are downloaded; None for a name that
    is no hub id, and for a checkpoint that does not say."""
    hub_id = HUB_ID.fullmatch(path)
    if hub_id is None or Path(path).expanduser().is_dir() or _looks_local(path, hub_id):
        return None
    refuse_unknown(path)
    data = read_training_data(_download(hub_id["repo"], hub_id["revision"], [FILE_NAME]))
    return None if data is None else replace(data, said_by=f"{path}/{FILE_NAME}")


def _looks_local(path: str, hub_id: re.Match[str]) -> bool:
    """A path whose parent is a folder here is a misspelt folder; a revision says that the hub is meant."""
    return hub_id["revision"] is None and Path(path).parent.is_dir()


def _not_a_checkpoint(path: str | Path, reason: str) -> UsageError:
    run = Path(path).parent.parent.name if Path(path).parent.name == "checkpoints" else ""
    if run in presets_of(FinetuneConfig):
        command = f"vlarl finetune {run} --run.name {run}"
        return UsageError(f"{path} is not a checkpoint: {reason}. It is what the preset {run} makes; run: {command}")
    return UsageError(f"{path} is not a checkpoint: {reason}. Give {ACCEPTED}.")


def _download(repo: str, revision: str | None, wanted: Sequence[str] = WANTED) -> Path:
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=UNWANTED))
    except Exception as error:  # what the transport raises has no name that all versions of the library share
        reason = _reason(error, repo, revision)
        raise UsageError(f"{repo} is no folder here, and can't be taken from the hub: {reason}") from error


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, GatedRepoError):
        return f"it is gated. Ask for access at {page}, then {LOGIN}."
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no model of that name, or it is private. Check the spelling, or {LOGIN}."
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision!r}. Its branches and tags are listed at {page}/tree/main."
    if isinstance(error, LocalEntryNotFoundError):
        where = f"it is not, or not wholly, in the cache {constants.HF_HUB_CACHE}"
        if constants.is_offline_mode():
            return f"HF_HUB_OFFLINE is set and {where}. Unset it, or copy the folder here and give its path."
        return f"{constants.ENDPOINT} can't be reached and {where}. Check the network, or give a folder's path."
    return f"{' '.join(str(error).split())}. Check the network and {constants.ENDPOINT}, then try again."
