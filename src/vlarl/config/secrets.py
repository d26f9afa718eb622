"""Keeps secrets out of what a run writes and prints: tokens in addresses, and headers that a service requires."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel

from vlarl.errors import UsageError

MASK = "***"
SHORTEST = 4  # characters of a text that is masked: a shorter one would occur everywhere

_ADDRESS = re.compile(
    r"""(?P<scheme>\b[a-z][a-z0-9+.-]*://) (?P<user>[^\s/?\#'"<>]*@)? (?P<place>[^\s?\#'"<>]*)
        (?P<query>\?[^\s\#'"<>]*)? (?P<fragment>\#[^\s'"<>]*)?""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADER = re.compile(r"(?P<name>[!#$%&'*+.^`|~\w-]+):[ \t]*(?P<value>[\x21-\x7e][\t\x20-\x7e]*)", re.ASCII)


def masked_url(url: str) -> str:
    """An address without user, password and the values of its query: `http://host/score?token=***`."""
    place, mark, query = url.partition("#")[0].partition("?")
    scheme, slashes, rest = place.partition("://")
    host, slash, path = rest.partition("/")
    user = f"{MASK}@" if "@" in host else ""
    return f"{scheme}{slashes}{user}{host.rpartition('@')[2]}{slash}{path}{mark}{_masked_query(query)}"


def masked(text: str) -> str:
    """A text with every address in it masked, for logs and messages."""

    def replaced(match: re.Match[str]) -> str:
        user = f"{MASK}@" if match["user"] else ""
        query = f"?{_masked_query(match['query'][1:])}" if match["query"] else ""
        return f"{match['scheme']}{user}{match['place']}{query}" + (f"#{MASK}" if match["fragment"] else "")

    return _ADDRESS.sub(replaced, text)


def is_masked(url: str) -> bool:
    """Whether an address was masked, so that no request can be sent to it."""
    return MASK in url


def has_user(url: str) -> bool:
    """Whether an address holds a user's name or password."""
    return "@" in url.partition("://")[2].partition("/")[0].partition("?")[0]


def public(config: BaseModel) -> dict[str, Any]:
    """A configuration as plain values to write to disk or send to other services: secrets are masked."""
    values = config.model_dump(mode="json")
    reward = values.get("reward", {})
    if reward.get("url") is not None:
        reward["url"] = masked_url(reward["url"])
    if reward.get("urls"):
        reward["urls"] = {name: masked_url(url) for name, url in reward["urls"].items()}
    return values


def read_headers(variable: str) -> dict[str, str]:
    """The headers in an environment variable, one `Name: value` per line. Messages never show what it holds."""
    text = os.environ.get(variable, "")
    if not text.strip():
        raise UsageError(
            f"reward.headers_env = {variable!r}: this environment variable is not set where the reward is computed; "
            f"set it, such as {variable}='Authorization: Bearer …', or leave the option out."
        )
    headers = {}
    for number, line in enumerate(text.strip().splitlines(), 1):
        match = _HEADER.fullmatch(line.strip())
        if match is None:
            raise UsageError(
                f"reward.headers_env = {variable!r}: line {number} of this environment variable is not a header; write "
                "`Name: value` in ASCII, one header per line."
            )
        headers[match["name"]] = match["value"]
    return headers


def secrets_in(url: str, headers: Iterable[str]) -> list[str]:
    """The texts that must not be repeated when a service echoes its request: values of the query and of headers."""
    query = urlsplit(url).query
    values = [value for _, value in parse_qsl(query, keep_blank_values=True)]
    raw = [part.partition("=")[2] or part for part in re.split("[&;]", query)]
    tokens = [word for header in headers for word in (header, *header.split()[1:])]
    return sorted({text for text in (*values, *raw, *tokens) if len(text) >= SHORTEST}, key=len, reverse=True)


def without(text: str, hidden: Iterable[str]) -> str:
    """A text with these texts masked."""
    for secret in hidden:
        text = text.replace(secret, MASK)
    return text


def _masked_query(query: str) -> str:
    parts = (part.partition("=") for part in query.split("&"))
    return "&".join(f"{name}={MASK}" if equals else MASK for name, equals, _ in parts) if query else ""
