"""Locate checkpoints: built-in names, folders and hub ids -> the folder on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from vlarl.config.known import BUILTINS
from vlarl.config.run_checkpoints import (
    as_hub_id,
    checkpoint_here,
    holding_policy,
    locate_checkpoint,
    refuse_unknown,
)
from vlarl.config.training_data import FILE_NAME, TrainingData, read_training_data
from vlarl.errors import UsageError

BUILTIN = {f"builtin:{name}": name for name in BUILTINS}
"""Checkpoints that ship with vlarl, and their folders in the package."""

# The files of a checkpoint. Neither pickled weights nor the repository's code is ever downloaded.
WANTED = ["*.json", "*.safetensors", "*_checkpoint.pt", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["*/*"]  # subfolders: other formats, adapters that are merged already, logs

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def checkpoint_folder(path: str | Path) -> Path:
    """The folder of a built-in name, a path, a run or a hub id; the latter is downloaded into the hub's cache."""
    name = locate_checkpoint(path).path
    folder = checkpoint_here(name)
    if folder is None:
        hub_id = as_hub_id(name)
        assert hub_id is not None, "anything else is refused"
        folder = holding_policy(name, _download(hub_id["repo"], hub_id["revision"]))
    return folder


def small_files(path: str, names: Sequence[str]) -> Path:
    """A folder with these files of a model on the hub, without its weights; UsageError for a name that is none."""
    hub_id = as_hub_id(path)
    if hub_id is None:
        raise UsageError(f"{path!r} is neither a folder nor a hub id: copy the model's small files here and name them.")
    return _download(hub_id["repo"], hub_id["revision"], names)


def hub_training_data(path: str) -> TrainingData | None:
    """What a checkpoint on the hub says it was trained on, before its weights are downloaded; None for a name that is
    not a hub id, and for a checkpoint that does not say."""
    hub_id = as_hub_id(path)
    if hub_id is None:
        return None
    refuse_unknown(path)
    data = read_training_data(_download(hub_id["repo"], hub_id["revision"], [FILE_NAME]))
    return None if data is None else replace(data, read_from=f"{path}/{FILE_NAME}")


def _download(repo: str, revision: str | None, wanted: Sequence[str] = WANTED) -> Path:
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=UNWANTED))
    except Exception as error:  # the transport's exceptions have different names in different versions of the library
        reason = _reason(error, repo, revision)
        raise UsageError(f"{repo} is not a directory here and can't be downloaded from the hub: {reason}") from error


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
