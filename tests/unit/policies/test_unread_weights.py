"""Policies of every family whose weights stay on disk until ranks read their parts: the same names, types and values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes.smolvla import FOLDER
from fakes.vlm_models import MIXTURES, TEXT_ONLY, WITH_IMAGES, write_model

from vlarl.errors import UsageError
from vlarl.policies.base import Policy
from vlarl.policies.deferred import stored_weight
from vlarl.policies.load import load_policy
from vlarl.policies.vlm.model import ModelAccess

UNREAD = [*TEXT_ONLY, *WITH_IMAGES, "qwen2, tied", "smolvla"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if name == "smolvla":
            return FOLDER
        kind, _, tied = name.partition(", ")
        return write_model(kind, root / name, tied=bool(tied))

    return folder


def values(policy: Policy) -> dict[str, torch.Tensor]:
    """All parameters and buffers; those that are on disk are read."""
    found = dict(policy.named_buffers())
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        stored = stored_weight(parameter)
        found[name] = parameter.detach() if stored is None else stored.rows(0, len(parameter))
        assert stored is None or found[name].shape == parameter.shape
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_on_disk_is_what_would_have_been_read(folder_of, name, dtype):
    folder = folder_of(name)
    whole, unread = load_policy(folder, dtype=dtype), load_policy(folder, dtype=dtype, deferred=True)
    expected, found = values(whole), values(unread)
    assert found.keys() == expected.keys()
    assert [n for n in expected if found[n].dtype != expected[n].dtype] == []
    assert [n for n in expected if not found[n].equal(expected[n])] == []
    shared = [len({id(p) for p in policy.model.parameters()}) for policy in (whole, unread)]
    assert shared[0] == shared[1], "what is tied stays tied"
    model = [p for p in unread.model.parameters()]
    assert all(stored_weight(p) is not None for p in model) and len(model) > 15
    assert sum(p.untyped_storage().nbytes() for p in model) < sum(p.nbytes for p in model) / 10
    assert not unread.training and [p.requires_grad for p in whole.parameters()] == [
        p.requires_grad for p in unread.parameters()
    ]


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_model_whose_stored_weights_are_joined_is_read_whole(folder_of, kind):
    folder = folder_of(kind)
    expected, found = values(load_policy(folder)), values(policy := load_policy(folder, deferred=True))
    assert all(stored_weight(p) is None for p in policy.parameters())
    assert found.keys() == expected.keys() and all(found[n].equal(expected[n]) for n in expected)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_model_that_changes_its_logits_is_refused_without_its_weights_too(folder_of, monkeypatch, deferred):
    """The check computes with random weights: with placeholders alone, all logits would be zero."""
    own = ModelAccess.logits
    monkeypatch.setattr(ModelAccess, "logits", lambda access, states: 2 * own(access, states))
    with pytest.raises(UsageError, match="changes its logits in a way that is not supported"):
        load_policy(folder_of("qwen2"), deferred=deferred)


def test_weights_of_another_size_are_refused_before_any_is_read(folder_of, tmp_path):
    folder = write_model("qwen2", tmp_path / "other", wide=True)
    (folder / "config.json").write_bytes((folder_of("qwen2") / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"don't fit its config.json; of another shape"):
        load_policy(folder, deferred=True)
