"""Rewards from a service: sends episodes as JSON over HTTP and receives scores. docs/rewards.md has the format."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, Literal
from urllib.request import Request

from PIL import Image

from vlarl.config.secrets import masked_url, read_headers, secrets_in, without
from vlarl.config.words import counted
from vlarl.deadline import DeadlineError, TimedCaller
from vlarl.errors import VlarlError
from vlarl.json_files import parse_json
from vlarl.rewards.base import RewardUnavailableError, Scoring, ScoringReward
from vlarl.rewards.exchange import RefusalError, WatchedExchange
from vlarl.types import Observation, Trajectory, Transition, UInt8Array

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
REMOTE_TIMEOUT_S = 10.0  # where reward.timeout_s is null
FIRST_WAIT_S = 0.5  # before the first retry; twice as long before each further one
BUSY = 429  # the only refusal that is not about the request


class RemoteReward(ScoringReward):
    """Posts batches of episodes to a service and assigns the scores in its reply."""

    def __init__(
        self,
        url: str,
        scoring: Scoring = "outcome",
        batch_size: int = 16,
        images: Literal["none", "last", "all"] = "none",
        timeout_s: float = REMOTE_TIMEOUT_S,
        retries: int = 2,
        max_request_bytes: int = 64_000_000,
        max_response_bytes: int = 1_000_000,
        first_wait_s: float = FIRST_WAIT_S,
        headers_env: str | None = None,
    ) -> None:
        super().__init__(scoring, batch_size)
        self.url = url
        self.shown_url = masked_url(url)
        self.headers_env = headers_env
        self._headers()  # missing headers are reported before the run starts
        self.images = images
        self.reads_images = images != "none"
        self.timeout_s = timeout_s
        self.retries = retries
        self.max_request_bytes = max_request_bytes
        self.max_response_bytes = max_response_bytes
        self.first_wait_s = first_wait_s
        self._caller = TimedCaller("remote reward")

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Request scores from the service; null for an episode becomes NaN."""
        episodes = [episode_json(trajectory, self.images) for trajectory in trajectories]
        request = {"version": FORMAT_VERSION, "scoring": self.scoring, "episodes": episodes}
        body = json.dumps(request, allow_nan=False).encode()
        if len(body) > self.max_request_bytes:
            raise VlarlError(
                f"a request of {len(body)} bytes for {len(episodes)} episodes exceeds reward.max_request_bytes = "
                f"{self.max_request_bytes}; lower reward.batch_size, or send fewer images with reward.images."
            )
        per_episode = [1 if self.scoring == "outcome" else len(t.transitions) for t in trajectories]
        reply = self._request(body)
        try:
            return read_reply(reply, per_episode)
        except VlarlError as error:  # it quotes the reply
            raise VlarlError(self._without_secrets(str(error))) from None

    def _request(self, body: bytes) -> bytes:
        """The service's reply; retried, after a while, when it is down, busy, slow or failing."""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.first_wait_s * 2 ** (attempt - 1))
            try:
                return self._post(body)
            except RefusalError as error:
                reason = self._without_secrets(str(error))
                if error.code < 500 and error.code != BUSY:
                    raise VlarlError(f"{self.shown_url} refused a request: {reason}") from None
            except (OSError, HTTPException) as error:  # OSError: refused, reset, unknown host, timed out
                reason = self._without_secrets(str(error)) or type(error).__name__
            log.warning(
                "%s did not reply (attempt %d of %d): %s", self.shown_url, attempt + 1, self.retries + 1, reason
            )
        raise RewardUnavailableError(f"{self.shown_url} did not reply in {self.retries + 1} attempts: {reason}")

    def _post(self, body: bytes) -> bytes:
        """One exchange with one deadline, from the DNS lookup to the last byte, whatever the service does."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"} | self._headers()
        request = Request(self.url, body, headers)
        with WatchedExchange(request, self.max_response_bytes, 2 * self.timeout_s) as exchange:
            try:
                return self._caller.call(exchange.run, self.timeout_s)
            except DeadlineError:
                raise TimeoutError(f"the exchange took longer than reward.timeout_s = {self.timeout_s:g} s") from None

    def _headers(self) -> dict[str, str]:
        """The user's own headers, read again each time: a token may be renewed during the run."""
        return {} if self.headers_env is None else read_headers(self.headers_env)

    def _without_secrets(self, text: str) -> str:
        """A service's text without secrets: it may repeat what it was sent."""
        return without(text, secrets_in(self.url, self._headers().values()))


def read_reply(reply: bytes, per_episode: Sequence[int]) -> list[list[float]]:
    """The scores in `{"rewards": […]}`: as many for each episode as it must have; null becomes NaN."""
    try:
        rewards = parse_json(reply)["rewards"]
    except (ValueError, KeyError, TypeError):
        raise VlarlError(f"the reply is not a JSON object with `rewards`: {_start(reply)}") from None
    if not isinstance(rewards, list) or len(rewards) != len(per_episode):
        raise VlarlError(f"`rewards` must be a list of {len(per_episode)}, one for each episode: {_start(reply)}")
    scores: list[list[float]] = []
    for entry, count in zip(rewards, per_episode, strict=True):
        values = [math.nan] * count if entry is None else entry if isinstance(entry, list) else [entry]
        if len(values) != count or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            raise VlarlError(
                f"an episode's entry in `rewards` must be {counted(count, 'number')}, or null: {_start(reply)}"
            )
        scores.append([float(value) for value in values])
    return scores


def episode_json(trajectory: Trajectory, images: Literal["none", "last", "all"]) -> dict[str, Any]:
    """An episode in the service's format."""
    task = trajectory.task
    texts = [_written(t, images != "none") for t in trajectory.transitions if t.text is not None]
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
        **({"responses": texts} if texts else {}),
    }


def _written(transition: Transition, with_images: bool) -> dict[str, Any]:
    """A text with its prompt; columns that JSON can't hold are sent as text."""
    prompt = transition.observation.prompt
    columns = {} if prompt is None else json.loads(json.dumps(dict(prompt.columns), default=str))
    messages = [] if prompt is None else [dict(message) for message in prompt.messages]
    written = {"prompt": messages, "completion": transition.text, "columns": columns}
    images = () if prompt is None or not with_images else prompt.images
    return written | ({"images": [jpeg_base64(image) for image in images]} if images else {})


def _seen(observation: Observation, with_image: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {"proprio": [float(value) for value in observation.proprio]}
    has_image = with_image and len(observation.images)
    return seen | ({"image": jpeg_base64(observation.images[0])} if has_image else {})


def jpeg_base64(image: UInt8Array) -> str:
    """[H, W, 3] as JPEG in base64."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=90)
    return base64.b64encode(file.getvalue()).decode()


def _start(reply: bytes) -> str:
    return repr(reply[:100].decode(errors="replace"))
