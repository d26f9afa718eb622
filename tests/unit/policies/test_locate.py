"""The real client of the hub talks to a small one on the loopback device."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from fakes.hub import READER, FakeHub, Repo

from vlarl.errors import UsageError
from vlarl.policies.locate import BUILTIN, checkpoint_folder
from vlarl.policies.openvla.checkpoint import read_policy


@pytest.fixture
def published(hub: FakeHub, checkpoint: Path) -> Path:
    """The fixture's checkpoint on the hub as open/vla, with files beside it that are not needed."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    extra = {
        "pytorch_model.bin": b"pickle",
        "modeling_prismatic.py": b"raise SystemExit",
        "lora_adapter/adapter_config.json": b"{}",
        "action_head--150000_checkpoint.pt": b"head",
        "tokenizer.model": b"pieces",
    }
    older = {**files, "dataset_statistics.json": b"{}"}
    hub.repos["open/vla"] = Repo({"main": {**files, **extra}, "v1.0": older})
    return checkpoint


def test_a_hub_id_is_downloaded_and_loads(hub, published):
    folder = checkpoint_folder("open/vla")
    names = {path.name for path in published.iterdir()}
    assert {path.name for path in folder.iterdir()} == names | {"action_head--150000_checkpoint.pt", "tokenizer.model"}
    for name in names:
        assert (folder / name).read_bytes() == (published / name).read_bytes()
    weights, original = (read_policy(path).state_dict() for path in (folder, published))
    assert all(weights[name].equal(original[name]) for name in original)


def test_a_second_time_nothing_is_downloaded_and_a_dead_hub_does_no_harm(hub, published):
    first = checkpoint_folder("open/vla")
    hub.requests.clear()
    assert checkpoint_folder("open/vla") == first
    assert not [request for request in hub.requests if "/resolve/" in request]
    hub.stop()
    assert checkpoint_folder("open/vla") == first


def test_a_revision_is_taken_by_name_and_by_commit(hub, published):
    repo = hub.repos["open/vla"]
    for revision in ("v1.0", repo.commit("v1.0")):
        folder = checkpoint_folder(f"open/vla@{revision}")
        assert folder.name == repo.commit("v1.0")
        assert (folder / "dataset_statistics.json").read_bytes() == b"{}"
    with pytest.raises(UsageError, match=r"open/vla is not a directory here.*no revision 'v2'.*/open/vla/tree/main"):
        checkpoint_folder("open/vla@v2")


def test_an_unknown_a_private_and_a_gated_model_say_what_to_do(hub, published, monkeypatch):
    with pytest.raises(UsageError, match=r"there is no model of that name, or it is private.*hf auth login"):
        checkpoint_folder("open/vlaa")
    hub.repos["open/vla"].private = True
    with pytest.raises(UsageError, match="or it is private"):
        checkpoint_folder("open/vla")
    hub.repos["open/vla"].private = False
    hub.repos["open/vla"].gated = True
    with pytest.raises(UsageError, match=rf"gated. Ask for access at {hub.url}/open/vla, then log in .*HF_TOKEN"):
        checkpoint_folder("open/vla")
    monkeypatch.setenv("HF_TOKEN", READER)
    assert (checkpoint_folder("open/vla") / "config.json").is_file()


def test_a_dead_hub_and_offline_mode_name_the_cache(hub, published, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=rf"HF_HUB_OFFLINE is set and it is not.*{tmp_path}/hub_cache.*Unset it"):
        checkpoint_folder("open/vla")
    assert hub.requests == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.stop()
    with pytest.raises(UsageError, match=rf"{hub.url} can't be reached and it is not.*Check the network"):
        checkpoint_folder("open/vla")


def test_a_model_of_another_kind_is_told(hub):
    hub.repos["open/data"] = Repo({"main": {"README.txt": b"hello"}})
    with pytest.raises(UsageError, match=r"open/data is not a checkpoint: it holds no config\.json"):
        checkpoint_folder("open/data")


def test_a_misspelt_folder_never_reaches_for_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("runs/foo", "runs/foo/checkpoints/final", "./foo", "../foo", "/foo/bar", "~/foo", "foo"):
        with pytest.raises(UsageError, match=f"{path} is not a checkpoint: there is no folder or run of that name"):
            checkpoint_folder(path)
    with pytest.raises(UsageError, match=r"tiny-oft: no folder or run of that name; did you mean builtin:tiny-oft\?"):
        checkpoint_folder("tiny-oft")
    assert hub.requests == []
    hub.repos["runs/foo"] = Repo({"main": {"config.json": b"{}"}})
    assert (checkpoint_folder("runs/foo@main") / "config.json").is_file()  # a revision says that the hub is meant


def test_folders_and_builtin_names(tmp_path, monkeypatch):
    for name in BUILTIN:
        assert (checkpoint_folder(name) / "config.json").is_file()
    with pytest.raises(UsageError, match=r"it holds no config\.json"):
        checkpoint_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert checkpoint_folder(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert checkpoint_folder(f"~/{tmp_path.name}") == tmp_path
