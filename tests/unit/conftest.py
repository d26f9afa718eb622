"""A hub that the real client talks to, for all unit tests."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from fakes.hub import FakeHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """An empty hub that the client takes for the real one, with an empty cache and nobody logged in."""
    server = FakeHub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)  # read from HF_ENDPOINT at import
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # its transfers are a service apart
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield server
    finally:
        server.stop()
