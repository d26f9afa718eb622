"""A checkpoint's config.json says which family reads it; a family is a line in the table of policies/load.py."""

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.kinds import TextPolicy

from vlarl.config.schema import Config, LoraConfig, ModelConfig
from vlarl.errors import UsageError
from vlarl.policies import load
from vlarl.policies.family import Description, Family, LoadOptions, MemoryEstimate, StoredWeights
from vlarl.policies.load import describe_checkpoint, family_of, load_policy, training_warning
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.run.parts import log_training_warning

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class TableDescription(Description):
    @property
    def prompt_length(self) -> int:
        return 5

    def model_facts(self, num_images: int | None) -> dict[str, str]:
        return {"table": "of tokens"}

    def file_facts(self) -> dict[str, list[str]]:
        return {}

    def to_json(self) -> dict:
        return {"path": self.path}

    def estimate_rollout(self, batch_size, dtype, quantize=None) -> MemoryEstimate:
        return MemoryEstimate(weights=1, activations=batch_size)

    def estimate_lora_update(
        self, microbatch_size, dtype, rank, gradient_checkpointing, quantize=None
    ) -> MemoryEstimate:
        return MemoryEstimate(weights=1, adapters=rank, activations=microbatch_size)


class TableFamily(Family):
    """A second family; it keeps what it was called with."""

    supported = "tables (model type table)"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path, LoadOptions]] = []

    def recognizes(self, config) -> bool:
        return False

    def read(self, path, folder, options) -> TextPolicy:
        self.calls.append((path, folder, options))
        return TextPolicy()

    def describe(self, path, folder, decoder=None, num_images=None) -> TableDescription:
        return TableDescription(path, "table", None, StoredWeights(3, "float32", 12, 1), ())

    def training_warning(self, path, folder) -> str | None:
        return "its tokens are random."


@pytest.fixture
def table(monkeypatch) -> TableFamily:
    family = TableFamily()
    monkeypatch.setitem(load.FAMILIES, "table", family)
    return family


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "table"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    return tmp_path / "model"


def test_a_second_family_is_one_line(table, folder, capsys, caplog):
    from vlarl.cli import main

    policy = load_policy(folder, dtype="bfloat16", chunk_length=3)
    assert isinstance(policy, TextPolicy) and not policy.training
    ((path, found, options),) = table.calls
    assert (path, found, options.chunk_length, options.decoder) == (str(folder), folder, 3, None)
    assert describe_checkpoint(folder).estimate_rollout(7, "float32").total == 8
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "table       of tokens\n" in said and "prompts of 5 tokens" in said
    with caplog.at_level(logging.WARNING):
        log_training_warning(Config(policy={"path": str(folder)}))
    assert caplog.messages == [f"policy.path = '{folder}': its tokens are random."]
    assert isinstance(load_policy(GOLDEN / "openvla-tiny"), OpenVLAPolicy)


def test_the_error_about_another_type_lists_all_families(table, folder):
    (folder / "config.json").write_text('{"model_type": "chair"}')
    message = r"model type chair is not supported; supported are OpenVLA and .*openvla-7b; SmolVLA .*; language and .*; tables \(model type table\)"
    with pytest.raises(UsageError, match=message):
        load_policy(folder)
    with pytest.raises(ValueError, match=message):
        describe_checkpoint(folder)


@pytest.mark.parametrize("kind", [None, "prismatic", ["openvla"]])
def test_openvla_is_recognised_by_its_fields_where_the_type_does_not_say_it(tmp_path, kind):
    shutil.copytree(GOLDEN / "openvla-tiny", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    assert isinstance(load_policy(tmp_path / "model"), OpenVLAPolicy)


def test_an_adapter_without_a_config_is_of_its_bases_family(table, folder, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert family_of(adapter) is table
    assert family_of(adapter, base=str(GOLDEN / "openvla-tiny")) is load.FAMILIES["openvla"]
    with pytest.raises(UsageError, match=r"was trained on .*/gone, which can't be loaded; say where it is"):
        family_of(adapter, base=str(tmp_path / "gone"))


def test_a_fresh_model_needs_no_warning():
    assert training_warning("init:tiny-oft") is None


def test_adapters_of_a_policy_without_a_probe_are_not_merged():
    with pytest.raises(UsageError, match="can't be merged: use the adapter as it is"):
        TextPolicy().probe_logits()


def test_adapters_are_folded_once():
    policy = load_policy(GOLDEN / "openvla-tiny")
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=2), seed=0)
    assert policy.has_adapter
    before = policy.eval().probe_logits()
    policy.fold_adapter()
    assert not policy.has_adapter and (policy.probe_logits() == before).all(), "fresh adapters change nothing"
    policy.fold_adapter()
    with policy.without_adapters():
        assert (policy.probe_logits() == before).all()
