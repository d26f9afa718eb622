"""Merging: the same logits as the adapter, a folder in the original layout, and refusals that leave nothing behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fakes.float_error import logit_judge

from vlarl.cli import main
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.errors import UsageError, VlarlError
from vlarl.export.merge import merge, update_config
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.checkpoint import has_untrained_tokens
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.probe import probe_input
from vlarl.policies.weight_files import stored_dtype

GOLDEN = Path(__file__).parents[2] / "golden"


def make_adapter(base: Path, folder: Path, scale: float = 0.02, **load: object) -> OpenVLAPolicy:
    policy = load_policy(base, **load)
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4), seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    policy.save(folder)
    return policy.eval()


@pytest.fixture
def adapter(tmp_path) -> Path:
    make_adapter(GOLDEN / "openvla-tiny", tmp_path / "adapter")
    return tmp_path / "adapter"


def test_merged_logits_equal_the_adapters(adapter, tmp_path):
    result = merge(adapter, tmp_path / "out", dtype="float32")
    merged, adapted = load_policy(tmp_path / "out"), load_policy(adapter).eval()
    judge = logit_judge(adapted, *probe_input(adapted.config))
    judge.check(merged.probe_logits())
    assert result.logit_error <= 8 * judge.worst, "the two passes' own errors, each at most four times float32's"
    assert result.rounding_error == 0
    plain = load_policy(GOLDEN / "openvla-tiny").probe_logits()
    assert (plain - adapted.probe_logits()).abs().max() > 1e-2, "the adapter does something"


def test_precision_is_the_bases_unless_given(adapter, tmp_path):
    assert merge(adapter, tmp_path / "same").dtype == "bfloat16"
    assert stored_dtype(tmp_path / "same") == torch.bfloat16
    merge(adapter, tmp_path / "full", dtype="float32")
    assert stored_dtype(tmp_path / "full") == torch.float32


def test_folder_is_in_the_original_layout(adapter, tmp_path):
    merge(adapter, tmp_path / "out", max_shard_bytes=1_000_000)
    base = GOLDEN / "openvla-tiny"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in base.iterdir()} - {"expected.npz", "model.safetensors"} <= names
    assert "model.safetensors.index.json" in names
    assert not [n for n in names if n.startswith(("adapter", "base.json", "trainer", "value_head"))]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    own = load_policy(base).model.state_dict()
    assert set(index["weight_map"]) == set(own)
    assert index["metadata"]["total_size"] == sum(tensor.numel() for tensor in own.values()) * 2


def test_metadata_says_what_was_merged(adapter, tmp_path):
    merge(adapter, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "merge_metadata.json").read_text())
    assert content["base"] == str((GOLDEN / "openvla-tiny").resolve())
    assert content["adapter"] == str(adapter)
    assert content["lora"]["rank"] == 4
    assert set(content["versions"]) == {"vlarl", "torch", "transformers", "peft", "safetensors"}
    assert content["timestamp"].endswith("+00:00")


def test_heads_are_kept_in_the_originals_files(tmp_path):
    base = GOLDEN / "openvla-oft-tiny"
    policy = make_adapter(base, tmp_path / "adapter", num_images=2)
    merge(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    for name in ("action_head--150000_checkpoint.pt", "proprio_projector--150000_checkpoint.pt"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    merged = load_policy(tmp_path / "out", actions="l1")
    assert merged.config.num_images == 2
    assert merged.config.use_proprio
    logit_judge(policy, *probe_input(policy.config)).check(merged.probe_logits())


def test_heads_of_our_own_become_the_originals_files(tmp_path):
    make_adapter(load_and_save("builtin:tiny-oft", tmp_path / "base"), tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    state = torch.load(tmp_path / "out" / "proprio_projector--0_checkpoint.pt", weights_only=True)
    own = load_policy("builtin:tiny-oft").proprio_projector.state_dict()
    assert torch.equal(state["module.fc1.weight"], own["fc1.weight"])
    assert not (tmp_path / "out" / "proprio_projector.safetensors").exists()
    assert load_policy(tmp_path / "out").config.use_proprio


@pytest.mark.parametrize("actions", ["l1", "hybrid"])
def test_a_merged_checkpoint_still_says_whether_its_tokens_were_trained(tmp_path, actions):
    """What the adapter trained last; the base, a folder of OpenVLA-OFT, comes with an L1 head alone."""
    policy = load_policy(GOLDEN / "openvla-oft-tiny", num_images=2, actions=actions)
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4), 0)
    policy.save(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    assert has_untrained_tokens(tmp_path / "out") == (actions == "l1")


def load_and_save(name: str, folder: Path) -> Path:
    load_policy(name).save(folder)
    return folder


def test_heads_beside_the_adapter_win_over_the_bases(tmp_path):
    base = GOLDEN / "openvla-oft-tiny"
    make_adapter(base, tmp_path / "adapter", num_images=2)
    state = torch.load(base / "action_head--150000_checkpoint.pt", weights_only=True)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    torch.save(changed, tmp_path / "adapter" / "action_head--5_checkpoint.pt")
    merge(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    (written,) = (tmp_path / "out").glob("action_head--*_checkpoint.pt")
    found = torch.load(written, weights_only=True)
    assert all(torch.equal(found[name], changed[name]) for name in changed)


def test_config_says_the_precision_that_was_written(adapter, tmp_path):
    merge(adapter, tmp_path / "out", dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_code_of_a_hub_base_is_pointed_at(tmp_path):
    config = {"auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    update_config(tmp_path, "openvla/openvla-7b@main", "bfloat16")
    found = json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoConfig"]
    assert found == "openvla/openvla-7b--configuration_prismatic.OpenVLAConfig"


def test_a_bad_destination_is_refused_before_the_merge(adapter, tmp_path, capsys):
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--push-to-hub", "nameless"]) == 2
    assert "not the name of a model on the hub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused_and_left_alone(adapter, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="out is not empty, and nothing is overwritten"):
        merge(adapter, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_used(adapter, tmp_path):
    (tmp_path / "out").mkdir()
    merge(adapter, tmp_path / "out")
    assert load_policy(tmp_path / "out").base is not None


def test_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no adapter"):
        merge(GOLDEN / "openvla-tiny", tmp_path / "out")


def test_another_base_is_refused_by_name_and_nothing_is_written(adapter, tmp_path):
    with pytest.raises(UsageError, match=r"was trained on .*openvla-tiny"):
        merge(adapter, tmp_path / "out", base="builtin:tiny-openvla")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_logits_that_differ_end_the_merge(adapter, tmp_path, monkeypatch):
    """A fold that forgets half of the adapter must be noticed by the command itself."""
    from peft.tuners.lora import Linear

    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: right(self, name) * 0.5)
    with pytest.raises(VlarlError, match="changes the logits by"):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".new-out").exists()


def test_a_file_written_wrong_ends_the_merge(adapter, tmp_path, monkeypatch):
    right = OpenVLAPolicy.save

    def wrong(self, folder, dtype=None, **options):
        self.model.projector.fc1.bias.data += 1
        right(self, folder, dtype, **options)
        self.model.projector.fc1.bias.data -= 1

    monkeypatch.setattr(OpenVLAPolicy, "save", wrong)
    with pytest.raises(VlarlError, match="reading back"):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command(adapter, tmp_path, capsys):
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "of the adapter model's, in float32" in said
    assert str(tmp_path / "out") in said
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
