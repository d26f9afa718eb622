"""Trust in saved configurations: code and services that a foreign config.yaml names are refused and listed.

A run's config.yaml says which code to import and which services to connect to. When vlarl writes the file it seals it:
`.config.yaml.seal` beside it holds an HMAC of its content under a key that only this user can read. A configuration
without a valid seal came from another user or machine, or was edited. Its plain values are used; the code and the
services that it names are not, unless the user trusts the file or names them again. docs/security.md has the rules.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlarl.config.callables import is_given
from vlarl.config.known import GYM
from vlarl.config.problems import shown
from vlarl.config.secrets import masked_url
from vlarl.errors import UsageError

KEY_BYTES = 32
RUN_FILES = ("checkpoints", "status.json", "metrics.jsonl", "episodes.jsonl")

Sections = Mapping[str, Mapping[str, Any]]


class UntrustedError(UsageError):
    """A file that is not this user's names code or a service."""


def key_file() -> Path | None:
    """The file of the user's key, in the XDG state folder; None if the user has no home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:  # such as in a container without an entry for the user
        return None
    return root / "vlarl" / "seal.key"


def seal_file(path: Path) -> Path:
    """The file that holds the seal of a file."""
    return path.with_name(f".{path.name}.seal")


def seals(path: Path, text: str) -> str:
    """The content of the seal for a file that is about to get this text; empty if the user has no key.

    A valid seal of the current content is kept beside the new one, so that the file is sealed even after a crash
    between writing the seal and writing the file.
    """
    key = _own_key(create=True)
    if key is None:
        return ""
    lines = [_seal(key, path.name, text.encode())]
    if is_sealed(path):
        lines.append(_seal(key, path.name, path.read_bytes()))
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))


def is_sealed(path: Path) -> bool:
    """Whether vlarl, run by this user, wrote the file's current content."""
    key = _own_key(create=False)
    try:
        known = seal_file(path).read_text(encoding="ascii").split()
        content = path.read_bytes()
    except (OSError, UnicodeDecodeError):
        return False
    return key is not None and any(hmac.compare_digest(seal, _seal(key, path.name, content)) for seal in known)


def is_of_run(path: Path) -> bool:
    """Whether a file is the configuration that a run has saved, by the files beside it."""
    return path.name == "config.yaml" and any((path.parent / name).exists() for name in RUN_FILES)


def refuse_untrusted(path: Path, sections: Sections, given: Collection[str]) -> None:
    """Refuse a saved configuration without a valid seal that names code or services.

    `sections` are the values that are about to be used; `given` the options, as `gym.env`, that the user named.
    """
    effects = list(effects_of(sections, given))
    if not effects or is_sealed(path):
        return
    reason = "its seal is not valid" if seal_file(path).is_file() else "it has no seal"
    if _own_key(create=False) is None:
        reason = _why_without_key(key_file())
    listed = "".join(f"\n  - {effect}" for effect in effects)
    raise UntrustedError(
        f"{path} was not written by you on this machine, or was edited ({reason}). It names what vlarl would run or "
        f"connect to:{listed}\nIf you trust all of it, add --trust; or give these options "
        "yourself on the command line. See docs/security.md."
    )


def effects_of(sections: Sections, given: Collection[str]) -> Iterator[str]:
    """What these options would import, call or connect to, a sentence for each; options that are given are left out."""
    yield from _gym_effects(sections, given)
    yield from _reward_effects(sections.get("reward", {}), given)
    distributed, logging = sections.get("distributed", {}), sections.get("logging", {})
    address = distributed.get("address")
    if distributed.get("backend") == "ray" and address not in (None, "auto") and "distributed.address" not in given:
        yield f"distributed.address = {shown(address)}: connects to this Ray cluster, which can run code here"
    variables = distributed.get("env_vars")
    if distributed.get("backend") == "ray" and variables and "distributed.env_vars" not in given:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in variables.items())
        yield f"distributed.env_vars: sets environment variables of workers, which can load code there ({listed})"
    if logging.get("wandb") and logging.get("wandb_mode") != "offline" and "logging.wandb" not in given:
        project = "/".join(str(logging[name]) for name in ("wandb_entity", "wandb_project") if logging.get(name))
        yield f"logging.wandb = true: sends the run's metrics and configuration to the W&B project {project}"


def _gym_effects(sections: Sections, given: Collection[str]) -> Iterator[str]:
    gym = sections.get("gym", {})
    env, kwargs = gym.get("env"), gym.get("kwargs") or {}
    if sections.get("env", {}).get("suite") != GYM or env is None:
        return
    arguments = ", ".join(f"{name}={shown(value)}" for name, value in kwargs.items())
    if "gym.env" not in given and not is_given(str(env)):
        module, colon, name = str(env).partition(":")
        what = f"imports {module} and makes {name}" if colon else "makes this environment"
        yield f"gym.env = {shown(env)}: {what} with the arguments ({arguments})"
    elif kwargs and "gym.kwargs" not in given:
        yield f"gym.kwargs: passes ({arguments}) to {env}"


def _reward_effects(reward: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    source = reward.get("source")
    named = {"reward.source": [source], "reward.sources": reward.get("sources") or () if source == "combined" else ()}
    for option, names in named.items():
        for name in names:
            if isinstance(name, str) and ":" in name and not is_given(name) and option not in given:
                module, _, function = name.partition(":")
                yield f"{option} = {shown(name)}: imports {module} and calls {function}"
    url, headers = reward.get("url"), reward.get("headers_env")
    is_remote = any("remote" in names for names in named.values())
    also = f", with the content of the environment variable {headers}" if headers else ""
    if is_remote and url is not None and "reward.url" not in given:
        yield f"reward.url = {shown(masked_url(str(url)))}: posts every episode to this address{also}"
    for name, address in (reward.get("urls") or {}).items():
        if "reward.urls" not in given and any(name in names for names in named.values()):
            shown_url = shown(masked_url(str(address)))
            yield f"reward.urls: {name} = {shown_url}: posts every episode to this address{also}"


def _seal(key: bytes, name: str, content: bytes) -> str:
    return hmac.new(key, name.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def _own_key(create: bool) -> bytes | None:
    """The user's key; None if there is none and none can be made, or if others could have read it."""
    path = key_file()
    if path is None:
        return None
    try:
        if create and not path.exists():
            _make_key(path)
        with path.open("rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                return None
            key = file.read(KEY_BYTES + 1)
    except OSError:
        return None
    return key if len(key) == KEY_BYTES else None


def _is_private(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


def _why_without_key(path: Path | None) -> str:
    """Why there is no valid key of the user's."""
    if path is None:
        return "there is no home folder for the key that its seal is checked with: set HOME or XDG_STATE_HOME"
    try:
        is_exposed = not _is_private(path.stat())
    except OSError:
        is_exposed = False
    if is_exposed:
        return f"the key in {path} is not used: it must be a file of yours that others cannot read, with mode 600"
    return f"there is no key in {path} to check its seal with"


def _make_key(path: Path) -> None:
    """Write a new key atomically; if several processes do so, the first one's key stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
