"""Untrusted checkpoints: a pickle that would run code is refused by name, and its code does not run."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from vlarl.cli import main
from vlarl.errors import UsageError
from vlarl.policies.load import describe_checkpoint, load_policy
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.components import read_component
from vlarl.policies.tiny import init_tiny
from vlarl.rewards.judge import JudgeOptions
from vlarl.rewards.model_kinds import load_reward_model


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def payload(tmp_path):
    """The payload; at the end of the test it must not have run."""
    evil = Payload(tmp_path / "the code ran")
    yield evil
    assert not evil.trace.exists(), "a file of weights ran code"


def zipped(evil, path):
    torch.save({"weight": torch.zeros(2), "state": evil}, path)


def in_the_old_format(evil, path):
    torch.save({"state": evil}, path, _use_new_zipfile_serialization=False)


def bare(evil, path):
    path.write_bytes(pickle.dumps({"state": evil}, protocol=2))


def oft_folder(folder: Path) -> Path:
    """A checkpoint whose component files are OFT's."""
    policy = init_tiny("parallel", seed=2)
    policy.save(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "vlarl"}))
    (folder / "proprio_projector.safetensors").unlink()
    torch.save(policy.proprio_projector.state_dict(), folder / "proprio_projector--9_checkpoint.pt")
    return folder


def test_the_payload_is_one(tmp_path):
    """Otherwise nothing below would prove anything."""
    for number, write in enumerate((zipped, in_the_old_format, bare)):
        evil = Payload(tmp_path / f"trace {number}")
        write(evil, tmp_path / "evil.pt")
        assert not evil.trace.exists()
        with (tmp_path / "evil.pt").open("rb") as file:
            pickle.load(file) if write is bare else torch.load(file, weights_only=False)
        assert evil.trace.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", [zipped, in_the_old_format, bare])
def test_a_component_file_that_would_run_code_is_refused(tmp_path, payload, write):
    path = tmp_path / "action_head--5_checkpoint.pt"
    write(payload, path)
    with pytest.raises(ValueError, match=r"action_head--5_checkpoint\.pt is not loaded: .* could run code") as error:
        read_component(tmp_path, "action_head")
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value), "no advice to run it after all"


@pytest.mark.parametrize(
    ("content", "what"),
    [([torch.zeros(2)], "holds a list"), ({"weight": [1.0]}, "weight is a list"), ({3: torch.zeros(2)}, "a name is 3")],
)
def test_a_component_file_of_something_else_is_refused(tmp_path, content, what):
    torch.save(content, tmp_path / "action_head--5_checkpoint.pt")
    with pytest.raises(ValueError, match=rf"action_head--5_checkpoint\.pt does not contain named tensors: .*{what}"):
        read_component(tmp_path, "action_head")


def test_a_truncated_component_file_is_named(tmp_path):
    path = tmp_path / "action_head--5_checkpoint.pt"
    torch.save({"weight": torch.zeros(500)}, path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"action_head--5_checkpoint\.pt is truncated or corrupt .*download it again"):
        read_component(tmp_path, "action_head")


def test_the_latest_component_file_is_read_without_its_prefix(tmp_path):
    head = nn.Linear(2, 2)
    torch.save({"module.weight": torch.zeros(2, 2), "module.bias": torch.zeros(2)}, tmp_path / "h--9_checkpoint.pt")
    torch.save({f"module.{n}": t for n, t in head.state_dict().items()}, tmp_path / "h--10_checkpoint.pt")
    state = read_component(tmp_path, "h")
    assert state is not None and set(state) == {"weight", "bias"}
    assert torch.equal(state["weight"], head.weight)


@pytest.mark.parametrize("name", ["proprio_projector", "vision_backbone", "value_head"])
def test_a_policy_with_such_a_file_is_refused(tmp_path, payload, capsys, name):
    folder = oft_folder(tmp_path / "oft")
    zipped(payload, folder / f"{name}--10_checkpoint.pt")
    with pytest.raises(ValueError, match=rf"{name}--10_checkpoint\.pt is not loaded"):
        read_policy(folder)
    root = tmp_path / "runs"
    assert main(["train", "--policy.path", str(folder), "--run.root", str(root), "--run.name", "run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and f"{name}--10_checkpoint.pt" in message
    assert not (root / "run").exists()


def test_a_policy_with_an_evil_regression_head_is_refused(tmp_path, payload):
    folder = oft_folder(tmp_path / "oft")
    zipped(payload, folder / "action_head--10_checkpoint.pt")
    with pytest.raises(ValueError, match=r"action_head--10_checkpoint\.pt is not loaded"):
        read_policy(folder, l1_head=True)


def pickled_model(folder: Path, evil: Payload, name: str) -> Path:
    """A checkpoint whose weights are a pickle only."""
    init_tiny("autoregressive", seed=2).save(folder)
    (folder / "model.safetensors").unlink()
    zipped(evil, folder / name)
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_pytorch_model_bin_is_not_read_and_the_remedy_is_told(tmp_path, payload, name):
    folder = pickled_model(tmp_path / "policy", payload, name)
    for read in (read_policy, describe_checkpoint):
        with pytest.raises(
            FileNotFoundError, match=rf"{name}, but a pickle could run code .*convert it to model\.safetensors"
        ):
            read(folder)


def test_a_pytorch_model_bin_beside_safetensors_is_left_alone(tmp_path, payload):
    policy = init_tiny("autoregressive", seed=2)
    policy.save(tmp_path / "policy")
    zipped(payload, tmp_path / "policy" / "pytorch_model.bin")
    loaded = load_policy(tmp_path / "policy").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in policy.state_dict().items())


def test_an_adapter_model_bin_is_not_read(tmp_path, payload):
    from vlarl.config.schema import LoraConfig, ModelConfig

    init_tiny("autoregressive", seed=2).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base")
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=2, target_modules=("q_proj",)), seed=1)
    policy.save(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    zipped(payload, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors"):
        load_policy(tmp_path / "adapter")


def test_a_reward_models_pickle_is_not_read(tmp_path, payload):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=10, num_labels=1, architectures=["BertForSequenceClassification"], **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    (tmp_path / "judge" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    shutil.move(tmp_path / "judge" / "model.safetensors", tmp_path / "kept")
    zipped(payload, tmp_path / "judge" / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"reward\.model: .*judge can't be loaded: .*safetensors"):
        load_reward_model(
            str(tmp_path / "judge"), torch.device("cpu"), "outcome", 4, JudgeOptions("{response}", r"\d+", 8)
        )


def test_a_reward_models_code_is_not_run_and_no_prompt_is_shown(tmp_path, monkeypatch):
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}')
    (judge / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass EvilConfig: pass\n")
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(UsageError, match=r"reward\.model: .*judge can't be loaded"):
        load_reward_model(str(judge), torch.device("cpu"), "outcome", 4, JudgeOptions("{response}", r"\d+", 8))
    assert not questions and not (tmp_path / "owned").exists()
