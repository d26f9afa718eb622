"""Pushing a checkpoint folder to the Hugging Face hub."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from vlarl.config.run_checkpoints import HUB_ID
from vlarl.errors import UsageError
from vlarl.policies.locate import LOGIN

# A run's own files, useless to others: the optimizer's state, twice as large as the model; a critic; notes.
KEPT_BACK = ["trainer.*", "critic/*", "sharded/*", "metadata.json"]

CARD = "README.md"


def push_folder(folder: Path, repo_id: str, private: bool, card: str | None = None) -> str:
    """Upload a folder's files to the model repository `organisation/name`, created if absent; returns its address.

    `card` is the text of the repository's README.md, for a folder that has none.
    """
    check_destination(repo_id)
    check_folder(folder)
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            ignore_patterns=list(KEPT_BACK),
            commit_message="Upload by vlarl",
        )
        if card is not None:
            api.upload_file(
                repo_id=repo_id,
                path_or_fileobj=card.encode(),
                path_in_repo=CARD,
                commit_message="Model card by vlarl",
            )
    except Exception as error:  # the transport's exceptions have different names in different versions of the library
        raise UsageError(f"{repo_id} can't be pushed to: {_reason(error)}") from error
    return str(address)


def pushed_files(folder: Path) -> list[Path]:
    """The files of a folder that `push_folder` uploads."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return [path for name, path in files.items() if not any(fnmatch(name, pattern) for pattern in KEPT_BACK)]


def check_folder(folder: Path) -> None:
    """Refuse a folder that contains no policy."""
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    parts = " It holds parts of the weights only: use `final` of the run." if (folder / "sharded").is_dir() else ""
    raise UsageError(f"{folder} is not pushed: it holds no config.json. Give a checkpoint or adapter folder.{parts}")


def check_name(repo_id: str) -> None:
    """Refuse a name that is not a valid model repository name."""
    hub_id = HUB_ID.fullmatch(repo_id)
    if hub_id is None or hub_id["revision"] is not None:
        raise UsageError(f"{repo_id!r} is not the name of a model on the hub: give organisation/name")


def check_destination(repo_id: str) -> None:
    """Refuse an invalid name, or a push without a login, before any work is done for it."""
    check_name(repo_id)
    if get_token() is None:
        raise UsageError(f"{repo_id} can't be pushed to: you are not logged in to {constants.ENDPOINT}; {LOGIN}.")


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    if not isinstance(error, HfHubHTTPError):
        return f"{said}. Check the network and {constants.ENDPOINT}; a second push resumes where the first one stopped."
    if error.response.status_code in (401, 403):
        return f"the hub refuses the token ({said}). Use one that may write to this organisation: {LOGIN}."
    return f"{said}."
