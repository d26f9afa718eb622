"""A reward service that wants a token: it gets it, and no message, log or file does."""

import logging

import pytest
from fakes.reward_service import RewardService, answers, length_of_each, send

from vlarl.errors import UsageError, VlarlError
from vlarl.rewards.base import RewardUnavailableError
from vlarl.rewards.remote import RemoteReward

SECRET = "s3cr3tT0ken"


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = RewardService()
    yield running
    running.stop()


@pytest.fixture
def episodes(trajectory):
    return [trajectory([[0, 0]] * 2, seed=1)]


def reward(service, **options):
    return RemoteReward(
        f"{service.url}?token={SECRET}", first_wait_s=0.01, **{"timeout_s": 5.0, "retries": 1} | options
    )


def test_headers_come_from_the_environment_at_each_request(service, episodes, monkeypatch):
    seen = []
    service.script = [lambda handler, request: (seen.append(dict(handler.headers)), length_of_each(handler, request))]
    monkeypatch.setenv("JUDGE", "Authorization: Bearer first")
    judge = RemoteReward(service.url, headers_env="JUDGE", timeout_s=5.0)
    judge.score_all(episodes)
    monkeypatch.setenv("JUDGE", "Authorization: Bearer second\nX-Team: robots")
    judge.score_all(episodes)
    assert [headers["Authorization"] for headers in seen] == ["Bearer first", "Bearer second"]
    assert "X-Team" not in seen[0] and seen[1]["X-Team"] == "robots"
    assert seen[1]["Content-Type"] == "application/json"
    assert "second" not in str(vars(judge)), "it is not kept"


def test_a_missing_variable_is_refused_when_the_reward_is_built(service, monkeypatch):
    monkeypatch.delenv("JUDGE", raising=False)
    with pytest.raises(UsageError, match=r"reward\.headers_env = 'JUDGE': this environment variable is not set"):
        RemoteReward(service.url, headers_env="JUDGE")


def echo(handler, request):
    """As many services do: the path and the headers of the request in the error's page."""
    send(handler, f"Cannot POST {handler.path}\n{handler.headers}".encode(), 404)


@pytest.mark.parametrize("reply", [echo, answers(f"token {SECRET} has no rewards".encode())])
def test_a_service_that_repeats_the_token_does_not_leak_it(service, episodes, monkeypatch, reply):
    service.script = [reply]
    monkeypatch.setenv("JUDGE", f"Authorization: Bearer {SECRET}")
    with pytest.raises(VlarlError, match=r"\*\*\*") as caught:
        reward(service, headers_env="JUDGE").score_all(episodes)
    assert SECRET not in str(caught.value)


def test_a_service_that_is_down_is_named_without_the_token(service, episodes, caplog):
    service.script = [answers(f"busy {SECRET}".encode(), 503)]
    with caplog.at_level(logging.WARNING), pytest.raises(RewardUnavailableError, match=r"token=\*\*\*") as caught:
        reward(service).score_all(episodes)
    assert SECRET not in str(caught.value) + caplog.text and "token=***" in caplog.text
