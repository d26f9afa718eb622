from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.vlm_models import write_model

from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.policy import VlmPolicy


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a kind, written once."""
    root = tmp_path_factory.mktemp("vlm")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).is_dir() else write_model(kind, root / kind)

    return folder


@pytest.fixture(scope="session")
def shared(folder_of: Callable[[str], Path]) -> Callable[[str], VlmPolicy]:
    """A policy of a kind, which tests only read."""
    known: dict[str, VlmPolicy] = {}

    def policy(kind: str) -> VlmPolicy:
        if kind not in known:
            known[kind] = read_policy(folder_of(kind))
        return known[kind]

    return policy
