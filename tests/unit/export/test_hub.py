"""The real client of the hub pushes to a small one on the loopback device."""

import re

import huggingface_hub.constants
import pytest
from fakes.hub import READER, WRITER

from vlarl.errors import UsageError
from vlarl.export.hub import push_folder
from vlarl.policies.locate import checkpoint_folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "merged"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "openvla"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "sub/notes.txt").write_text("hello")
    (folder / "trainer.safetensors").write_bytes(b"optimizer state")
    return folder


def pushed(folder):
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files["trainer.safetensors"]
    return files


def test_a_folder_arrives_byte_for_byte_and_comes_back(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert push_folder(folder, "me/vla", private=True) == f"{hub.url}/me/vla"
    assert hub.repos["me/vla"].private
    assert hub.repos["me/vla"].revisions["main"] == pushed(folder)
    assert len(hub.blobs) == 1  # the weights went the way of large files
    again = checkpoint_folder("me/vla")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_without_large_files_the_newer_uploader_does_the_same(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.lfs = re.compile("nothing")
    push_folder(folder, "me/vla", private=False)
    assert not hub.repos["me/vla"].private
    assert hub.repos["me/vla"].revisions["main"] == pushed(folder)


def test_a_second_push_replaces_what_changed(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    push_folder(folder, "me/vla", private=False)
    (folder / "config.json").write_text('{"model_type": "openvla", "more": 1}')
    assert push_folder(folder, "me/vla", private=False) == f"{hub.url}/me/vla"
    assert hub.repos["me/vla"].revisions["main"] == pushed(folder)


def test_without_a_token_nothing_is_sent(hub, folder):
    with pytest.raises(UsageError, match=rf"me/vla can't be pushed to: you are not logged in to {hub.url}.*HF_TOKEN"):
        push_folder(folder, "me/vla", private=False)
    assert hub.requests == []


def test_a_token_that_may_not_write_is_told(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(UsageError, match=r"the hub refuses the token \(.*You don't have the rights.*may write"):
        push_folder(folder, "me/vla", private=False)
    assert "me/vla" not in hub.repos


def test_a_dead_hub_is_named(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    hub.stop()
    with pytest.raises(UsageError, match=rf"me/vla can't be pushed to: .*Check the network and {hub.url}"):
        push_folder(folder, "me/vla", private=False)


@pytest.mark.parametrize("name", ["vla", "me/vla/more", "me/vla@main", "", "me/"])
def test_names_that_are_not_models_are_refused(hub, folder, name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with pytest.raises(UsageError, match="not the name of a model on the hub: give organisation/name"):
        push_folder(folder, name, private=False)
    assert hub.requests == []


def test_a_folder_that_is_no_checkpoint_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with pytest.raises(UsageError, match=r"it holds no config\.json"):
        push_folder(tmp_path, "me/vla", private=False)
    assert hub.requests == []
