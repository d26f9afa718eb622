"""A reward service on the loopback: what is sent, which rewards are assigned, and every way the service can fail."""

import base64
import io
import threading
import time
from http.client import HTTPException
from urllib.request import Request

import numpy as np
import pytest
from fakes.reward_service import RewardService, answers, length_of_each, send
from PIL import Image

from vlarl.errors import VlarlError
from vlarl.rewards.base import RewardUnavailableError
from vlarl.rewards.exchange import WatchedExchange
from vlarl.rewards.remote import RemoteReward, episode_json
from vlarl.rewards.safe import SafeReward


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = RewardService()
    yield running
    running.stop()


@pytest.fixture
def remote(service):
    """remote(**options): a reward that calls the service and does not wait long."""
    return lambda **options: RemoteReward(service.url, first_wait_s=0.01, **{"timeout_s": 2.0} | options)


@pytest.fixture
def episodes(trajectory):
    return [trajectory([[0, 0]] * n, num_executed=[2] * (n - 1) + [1], seed=n) for n in (1, 2, 3)]


def assigned(trajectory):
    return [t.rewards.tolist() for t in trajectory.transitions]


def test_scores_are_assigned_to_the_last_executed_step(remote, service, episodes):
    scored = remote().score_all(episodes)
    assert [assigned(s)[-1] for s in scored] == [[1, 0], [3, 0], [5, 0]]
    assert [s.env_return for s in scored] == [1, 3, 5]
    (request,) = service.requests
    assert request["version"] == 1 and request["scoring"] == "outcome" and len(request["episodes"]) == 3


def test_scores_of_decisions(remote, service, episodes):
    service.script = [answers({"rewards": [[1], [2, 3], [4, 5, 6.5]]})]
    assert [assigned(s) for s in remote(scoring="steps").score_all(episodes)] == [
        [[1, 0]],
        [[0, 2], [3, 0]],
        [[0, 4], [0, 5], [6.5, 0]],
    ]
    assert service.requests[0]["scoring"] == "steps"
    assert [assigned(s)[-1] for s in remote(scoring="sum").score_all(episodes)] == [[1, 0], [5, 0], [15.5, 0]]


def test_the_documented_format_of_an_episode(trajectory, observation):
    episode = trajectory([[0, 0], [0, 0]], num_executed=[2, 1], terminated=True, success=True)
    told = episode_json(episode, "none")
    assert told["decisions"][0] == {
        "proprio": pytest.approx(episode.transitions[0].observation.proprio.tolist()),
        "num_executed": 2,
    }
    assert told["final"] == {"proprio": pytest.approx(episode.final_observation.proprio.tolist())}
    del told["decisions"], told["final"]
    assert told == {
        "episode_id": episode.task.episode_id,
        "suite": "tabletop_spatial",
        "task_id": 0,
        "init_state": 0,
        "instruction": "open the drawer",
        "success": True,
        "terminated": True,
        "truncated": False,
        "length": 3,
    }


def test_images_are_sent_as_jpeg(trajectory):
    episode = trajectory([[0], [0]])
    last, everything = episode_json(episode, "last"), episode_json(episode, "all")
    assert "image" not in last["decisions"][0]
    assert last["final"]["image"] == everything["final"]["image"]
    for told, seen in zip(
        [*everything["decisions"], everything["final"]],
        [*(t.observation for t in episode.transitions), episode.final_observation],
        strict=True,
    ):
        image = Image.open(io.BytesIO(base64.b64decode(told["image"])))
        assert image.format == "JPEG"
        np.testing.assert_allclose(np.asarray(image, dtype=int), seen.images[0], atol=8)


def test_a_service_that_fails_and_recovers_is_retried(remote, service, episodes):
    for trouble in (
        answers(b"oops", 500),
        answers(b"wait", 503),
        answers(b"busy", 429),
        lambda handler, _: handler.connection.close(),
    ):
        service.requests.clear()
        service.script = [trouble, length_of_each]
        assert [s.env_return for s in remote(retries=1).score_all(episodes)] == [1, 3, 5]
        assert len(service.requests) == 2


def test_waits_grow(remote, service, episodes, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    service.script = [answers(b"", 500)]
    with pytest.raises(RewardUnavailableError, match=r"127.0.0.1.* did not reply in 4 attempts: HTTP 500"):
        remote(retries=3).score_all(episodes)
    assert waits == [0.01, 0.02, 0.04] and len(service.requests) == 4


def test_a_slow_service_is_abandoned(remote, service, episodes):
    given_up = threading.Event()
    service.script = [lambda handler, request: given_up.wait(300)]
    with pytest.raises(RewardUnavailableError, match="took longer than reward.timeout_s = 0.1 s"):
        remote(timeout_s=0.1, retries=1).score_all(episodes)
    given_up.set()


def raw(*parts, then=b" "):
    """Sends these bytes, then one more again and again for as long as the other side listens."""

    def drip(handler, request):
        try:
            for part in parts:
                handler.wfile.write(part)
            while not handler.server.dripped.wait(0.02):
                handler.wfile.write(then)
        except OSError:  # the other side has ended the connection
            handler.server.dripped.set()

    return drip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "drip",
    [
        pytest.param(raw(then=b"x"), id="the status line"),
        pytest.param(raw(b"HTTP/1.1 100 Continue\r\n\r\n", then=b"HTTP/1.1 100 Continue\r\n\r\n"), id="continue"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nX: ", then=b"x"), id="a header"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n\r\n"), id="the body"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", then=b"1\r\n \r\n"), id="chunks"),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", then=b"X: y\r\n"), id="trailers"
        ),
        pytest.param(raw(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n", then=b""), id="the body of an error"),
    ],
)
def test_an_exchange_that_drips_has_one_deadline_and_its_connection_ends(remote, service, episodes, drip):
    """Each byte comes in time, the whole does not."""
    service.server.dripped = threading.Event()
    service.script = [drip]
    reward = remote(timeout_s=0.5, retries=0)
    with pytest.raises(RewardUnavailableError, match=r"took longer than reward.timeout_s = 0.5 s"):
        reward.score_all(episodes)
    service.requests.clear()
    service.script = [length_of_each]
    assert [s.env_return for s in reward.score_all(episodes)] == [1, 3, 5], "the next request is not held up"
    service.server.dripped.set()


@pytest.mark.timeout(60)
def test_an_abandoned_connection_is_closed(remote, service, episodes):
    service.server.dripped = threading.Event()
    service.script = [raw(b"HTTP/1.1 200 OK\r\n\r\n")]
    with pytest.raises(RewardUnavailableError):
        remote(timeout_s=0.5, retries=0).score_all(episodes)
    assert service.server.dripped.wait(30), "the service notices"


@pytest.mark.timeout(60)
def test_the_end_of_the_block_ends_an_exchange_that_waits(service):
    """The service says nothing at all, and the thread waits for it inside the system."""
    called, release = threading.Event(), threading.Event()
    service.script = [lambda handler, request: (called.set(), release.wait(300))]
    failures = []

    def run() -> None:
        try:
            exchange.run()
        except (OSError, HTTPException) as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with WatchedExchange(Request(service.url, b"{}"), max_response_bytes=1000, socket_timeout_s=600) as exchange:
        thread.start()
        assert called.wait(30)
    thread.join(20)
    assert not thread.is_alive() and len(failures) == 1
    release.set()


def test_no_service(episodes, service):
    service.stop()
    with pytest.raises(RewardUnavailableError, match="did not reply in 2 attempts"):
        RemoteReward(service.url, retries=1, first_wait_s=0.01).score_all(episodes)


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (b"<html>", "not a JSON object with `rewards`: '<html>'"),
        (b"\xff\xfe", "not a JSON object"),
        (b"", "not a JSON object"),
        (b"[1, 2, 3]", "not a JSON object"),
        ({"scores": [1, 2, 3]}, "not a JSON object with `rewards`"),
        ({"rewards": [1, 2]}, "must be a list of 3"),
        ({"rewards": 5}, "must be a list of 3"),
        ({"rewards": [1, 2, "3"]}, "must be 1 number, or null"),
        ({"rewards": [1, 2, True]}, "must be 1 number, or null"),
        ({"rewards": [1, 2, [3, 4]]}, "must be 1 number, or null"),
    ],
)
def test_garbage_is_refused_with_its_beginning(remote, service, episodes, reply, complaint):
    service.script = [answers(reply)]
    with pytest.raises(VlarlError, match=complaint) as refusal:
        remote().score_all(episodes)
    assert not isinstance(refusal.value, RewardUnavailableError) and len(service.requests) == 1


def test_a_reply_that_is_too_long_is_not_read(remote, service, episodes):
    service.script = [answers(b" " * 10_000)]
    with pytest.raises(VlarlError, match="longer than reward.max_response_bytes = 5000"):
        remote(max_response_bytes=5000).score_all(episodes)


def test_a_request_that_is_too_long_is_not_sent(remote, service, episodes):
    with pytest.raises(
        VlarlError, match=r"for 3 episodes exceeds reward.max_request_bytes = 100; lower reward.batch_size"
    ):
        remote(max_request_bytes=100).score_all(episodes)
    assert service.requests == []


@pytest.mark.parametrize("code", [400, 404, 413])
def test_a_refusal_is_not_retried(remote, service, episodes, code):
    service.script = [answers(b"no such sample", code)]
    with pytest.raises(VlarlError, match=f"refused a request: HTTP {code} .*no such sample"):
        remote().score_all(episodes)
    assert len(service.requests) == 1


def test_a_redirect_is_not_followed(remote, service, episodes):
    service.script = [lambda handler, request: send(handler, b"", 302, [("Location", service.url)])]
    with pytest.raises(VlarlError, match="refused a request: HTTP 302"):
        remote().score_all(episodes)
    assert len(service.requests) == 1


def test_null_and_nan_fail_their_episode_alone(remote, service, episodes):
    service.script = [answers(b'{"rewards": [1, null, 3]}'), answers(b'{"rewards": [NaN]}')]
    scored = SafeReward(remote(), retries=1).score_all(episodes)
    assert [s.status for s in scored] == ["ok", "reward_failed", "ok"]
    assert [len(r["episodes"]) for r in service.requests] == [3, 1, 1], "only that episode is retried"


def test_a_service_that_chokes_on_one_episode_costs_that_one(remote, service, episodes):
    def picky(handler, request):
        if any(episode["length"] == 3 for episode in request["episodes"]):
            send(handler, b"I can't", 400)
        else:
            length_of_each(handler, request)

    service.script = [picky]
    scored = SafeReward(remote(batch_size=3), retries=0).score_all(episodes)
    assert [(s.status, s.env_return) for s in scored] == [("ok", 1), ("reward_failed", 0), ("ok", 5)]
    assert "HTTP 400" in scored[1].reward_error
