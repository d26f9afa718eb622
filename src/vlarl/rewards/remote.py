"""Rewards from a service: episodes go out as JSON over HTTP, scores come back. docs/rewards.md has the format."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import IO, Any, Literal
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from PIL import Image

from vlarl.errors import VlarlError
from vlarl.rewards.base import RewardUnavailableError, Scoring, ScoringReward
from vlarl.types import Observation, Trajectory, UInt8Array

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
FIRST_WAIT_S = 0.5  # before the first repeat; twice as long before each further one
BUSY = 429  # the one refusal that says nothing about the request


class RemoteReward(ScoringReward):
    """Posts batches of episodes to a service and pays the scores that it answers."""

    def __init__(
        self,
        url: str,
        scoring: Scoring = "outcome",
        batch_size: int = 16,
        images: Literal["none", "last", "all"] = "none",
        timeout_s: float = 10.0,
        retries: int = 2,
        max_request_bytes: int = 64_000_000,
        max_response_bytes: int = 1_000_000,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        super().__init__(scoring, batch_size)
        self.url = url
        self.images = images
        self.reads_images = images != "none"
        self.timeout_s = timeout_s
        self.retries = retries
        self.max_request_bytes = max_request_bytes
        self.max_response_bytes = max_response_bytes
        self.first_wait_s = first_wait_s
        self._opener = build_opener(_NoRedirects)

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Ask the service; an episode that it answers with null has the score NaN."""
        episodes = [episode_json(trajectory, self.images) for trajectory in trajectories]
        question = {"version": FORMAT_VERSION, "scoring": self.scoring, "episodes": episodes}
        body = json.dumps(question, allow_nan=False).encode()
        if len(body) > self.max_request_bytes:
            raise VlarlError(
                f"a request of {len(body)} bytes for {len(episodes)} episodes exceeds reward.max_request_bytes = "
                f"{self.max_request_bytes}; lower reward.batch_size, or send fewer pictures with reward.images."
            )
        per_episode = [1 if self.scoring == "outcome" else len(t.transitions) for t in trajectories]
        return read_answer(self._ask(body), per_episode)

    def _ask(self, body: bytes) -> bytes:
        """The service's answer; asked again, after a while, when it is down, busy, slow or failing."""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
            try:
                return self._post(body)
            except HTTPError as error:
                with error:
                    reason = f"HTTP {error.code} {error.reason}: {error.read(200).decode(errors='replace').strip()}"
                if error.code < 500 and error.code != BUSY:
                    raise VlarlError(f"{self.url} refused a request: {reason}") from None
            except (OSError, HTTPException) as error:  # OSError: refused, reset, unknown host, timed out
                reason = str(error) or type(error).__name__
            log.warning("%s did not answer (attempt %d of %d): %s", self.url, attempt + 1, self.retries + 1, reason)
        raise RewardUnavailableError(f"{self.url} did not answer in {self.retries + 1} attempts: {reason}")

    def _post(self, body: bytes) -> bytes:
        deadline = time.monotonic() + self.timeout_s
        request = Request(self.url, body, {"Content-Type": "application/json", "Accept": "application/json"})
        with self._opener.open(request, timeout=self.timeout_s) as response:
            return _read(response, self.max_response_bytes, deadline)


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST becomes a GET without its content: treated as the refusal that it is."""

    def redirect_request(self, *_: object) -> None:
        """Follow nothing."""


def _read(response: IO[bytes], limit: int, deadline: float) -> bytes:
    """The whole answer, unless it is too long or drips in too slowly."""
    parts, size = [], 0
    while part := response.read1(min(limit + 1, 65_536)):  # type: ignore[attr-defined]
        parts.append(part)
        size += len(part)
        if size > limit:
            raise VlarlError(f"the answer is longer than reward.max_response_bytes = {limit}.")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer took longer than reward.timeout_s")
    return b"".join(parts)


def read_answer(answer: bytes, per_episode: Sequence[int]) -> list[list[float]]:
    """The scores in `{"rewards": […]}`: as many for each episode as it must have; null becomes NaN."""
    try:
        rewards = json.loads(answer)["rewards"]
    except (ValueError, KeyError, TypeError):
        raise VlarlError(f"the answer is not a JSON object with `rewards`: {_start(answer)}") from None
    if not isinstance(rewards, list) or len(rewards) != len(per_episode):
        raise VlarlError(f"`rewards` must be a list of {len(per_episode)}, one for each episode: {_start(answer)}")
    scores: list[list[float]] = []
    for entry, count in zip(rewards, per_episode, strict=True):
        numbers = [math.nan] * count if entry is None else entry if isinstance(entry, list) else [entry]
        if len(numbers) != count or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise VlarlError(f"an episode's entry in `rewards` must be {count} numbers, or null: {_start(answer)}")
        scores.append([float(number) for number in numbers])
    return scores


def episode_json(trajectory: Trajectory, images: Literal["none", "last", "all"]) -> dict[str, Any]:
    """An episode as the service reads it."""
    task = trajectory.task
    return {
        "episode_id": task.episode_id,
        "suite": task.suite,
        "task_id": task.task_id,
        "init_state": task.init_state,
        "instruction": trajectory.final_observation.instruction,
        "success": trajectory.success,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "length": trajectory.length,
        "decisions": [
            _seen(t.observation, images == "all") | {"num_executed": t.num_executed} for t in trajectory.transitions
        ],
        "final": _seen(trajectory.final_observation, images != "none"),
    }


def _seen(observation: Observation, with_image: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {"proprio": [float(number) for number in observation.proprio]}
    return seen | {"image": jpeg_base64(observation.images[0])} if with_image else seen


def jpeg_base64(image: UInt8Array) -> str:
    """[H, W, 3] as JPEG in base64."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return base64.b64encode(file.getvalue()).decode()


def _start(answer: bytes) -> str:
    return repr(answer[:100].decode(errors="replace"))
