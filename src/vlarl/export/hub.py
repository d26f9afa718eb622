"""Pushing a checkpoint folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from vlarl.errors import UsageError
from vlarl.policies.locate import HUB_ID, LOGIN

# A run's own files: the optimizer's moments are of no use to others, and twice as large as the model.
KEPT_BACK = ["trainer.*"]


def push_folder(folder: Path, repo_id: str, private: bool) -> str:
    """Upload a folder's files to the model repository `organisation/name`, made when absent; returns its address."""
    check_destination(repo_id)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} is not pushed: it holds no config.json. Give a checkpoint or adapter folder.")
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            ignore_patterns=list(KEPT_BACK),
            commit_message="Upload by vlarl",
        )
    except Exception as error:  # what the transport raises has no name that all versions of the library share
        raise UsageError(f"{repo_id} can't be pushed to: {_reason(error)}") from error
    return str(address)


def check_destination(repo_id: str) -> None:
    """Refuse a name that is none, or a push without a login, before any work is done for it."""
    hub_id = HUB_ID.fullmatch(repo_id)
    if hub_id is None or hub_id["revision"] is not None:
        raise UsageError(f"{repo_id!r} is no name of a model on the hub: give organisation/name")
    if get_token() is None:
        raise UsageError(f"{repo_id} can't be pushed to: you are not logged in to {constants.ENDPOINT}; {LOGIN}.")


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    if not isinstance(error, HfHubHTTPError):
        return f"{said}. Check the network and {constants.ENDPOINT}; a second push goes on where the first one stopped."
    if error.response.status_code in (401, 403):
        return f"the hub refuses the token ({said}). Take one that may write to this organisation: {LOGIN}."
    return f"{said}."
