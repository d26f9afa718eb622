"""Tokens in addresses and headers do not get into files, messages and commands' output."""

import pytest

from vlarl.cli import configured, main
from vlarl.config import load_config, to_yaml
from vlarl.config.problems import ConfigError
from vlarl.config.secrets import masked, masked_url, public, read_headers
from vlarl.errors import UsageError
from vlarl.observability.run_dir import RunDirectory

SECRET = "s3cr3tT0ken"
URL = f"https://judge.example/score?token={SECRET}&model=a"
REMOTE = {"reward.source": "remote", "reward.url": URL}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000/score", "http://localhost:8000/score"),
        (URL, "https://judge.example/score?token=***&model=***"),
        (f"https://h/?{SECRET}", "https://h/?***"),
        (f"https://h/a?b=c=d#{SECRET}", "https://h/a?b=***"),
        (f"https://me:{SECRET}@h:1/a", "https://***@h:1/a"),
        (f"https://me:p@{SECRET}@h/a", "https://***@h/a"),
        (f"https://h?q='{SECRET}'", "https://h?q=***"),
    ],
)
def test_an_address_without_its_secrets(url, shown):
    assert masked_url(url) == shown and SECRET not in masked_url(url)


def test_addresses_in_a_text():
    text = f"POST {URL} failed: see (http://u:{SECRET}@h/x) or 'ray://h:1?a={SECRET}', http://h/plain. a?b=c"
    shown = masked(text)
    assert SECRET not in shown
    assert "https://judge.example/score?token=***&model=***" in shown
    assert "http://***@h/x" in shown and "'ray://h:1?a=***'" in shown and shown.endswith("http://h/plain. a?b=c")


def test_what_is_written_and_sent_holds_no_token(capsys):
    config = load_config(overrides=REMOTE)
    assert config.reward.url == URL, "the run itself has the whole address"
    assert SECRET not in to_yaml(config) and SECRET not in str(public(config))
    assert main(["train", "--reward.source", "remote", "--reward.url", URL, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert SECRET not in printed and "url: https://judge.example/score?token=***&model=***" in printed


@pytest.mark.parametrize(
    "overrides",
    [
        {"reward.url": URL},  # which no reward reads
        {**REMOTE, "reward.url": f"ftp://h/?t={SECRET}"},
        {**REMOTE, "reward.url": f"https://me:{SECRET}@h/score"},
        {**REMOTE, "reward.headers_env": f"Authorization: Bearer {SECRET}"},
    ],
)
def test_problems_are_reported_without_the_token(overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert SECRET not in str(caught.value)


def test_user_and_password_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"https://\*\*\*@h/score'.*reward\.headers_env"):
        load_config(overrides={**REMOTE, "reward.url": "https://me:word@h/score"})


def test_a_resumed_run_needs_its_address_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs", "first")
    run.write_config(to_yaml(load_config(overrides={**REMOTE, "run.name": "first"})))
    assert SECRET not in run.config_file.read_text()
    urls: list[str | None] = []

    def begin(config, resume):
        urls.append(config.reward.url)
        raise RuntimeError

    with pytest.raises(ConfigError, match=r"the part after `\?` was not saved with the run.*--reward\.url"):
        configured.train(["--resume", "first"], begin)
    with pytest.raises(RuntimeError):
        configured.train(["--resume", "first", "--reward.url", URL], begin)
    assert urls == [URL]


def test_a_status_holds_no_token(tmp_path):
    run = RunDirectory.create(tmp_path, "first")
    run.write_status("failed", 1, 2, f"VlarlError: {URL} refused a request")
    assert SECRET not in run.status_file.read_text()
    assert "score?token=***" in run.read_status()["message"]


def test_headers_are_read_line_by_line(monkeypatch):
    monkeypatch.setenv("JUDGE", f"Authorization: Bearer {SECRET}\nX-Team:  robots \n")
    assert read_headers("JUDGE") == {"Authorization": f"Bearer {SECRET}", "X-Team": "robots"}


@pytest.mark.parametrize("value", ["", "  ", SECRET, f"Bad name: {SECRET}", f"A: {SECRET}\n: b", f"A: \x07{SECRET}"])
def test_what_is_no_header_is_refused_and_not_shown(monkeypatch, value):
    monkeypatch.setenv("JUDGE", value)
    with pytest.raises(UsageError, match=r"reward\.headers_env = 'JUDGE'") as caught:
        read_headers("JUDGE")
    assert SECRET not in str(caught.value)
