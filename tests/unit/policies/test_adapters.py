"""LoRA adapters: what they change, what they leave alone, what their folders hold, and whose base they are."""

import json
from pathlib import Path

import pytest
import torch
from fakes.float_error import check_gradients, exactly, gradients_of, logit_judge
from peft.tuners.lora import Linear as PeftLinear
from safetensors.torch import load_file, save_file

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.errors import UsageError
from vlarl.policies import adapters
from vlarl.policies.load import load_policy
from vlarl.policies.lora import LoraLinear
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny

LORA = LoraConfig(enabled=True, rank=4)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    init_tiny("autoregressive", seed=1).save(folder)
    return folder


@pytest.fixture
def probe(base, observation) -> tuple[OpenVLAInputs, torch.Tensor]:
    policy = load_policy(base)
    inputs = policy.process([observation(0), observation(1, "pick up the red cube")])
    tokens = policy.codec.first_id + torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(3))
    return inputs, tokens


def adapted(folder: Path, lora: LoraConfig = LORA, **settings: object) -> OpenVLAPolicy:
    policy = load_policy(folder)
    policy.prepare_training(ModelConfig(**settings), lora, seed=0)
    return policy


def disturb(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """As training would: adapters start at zero effect, this moves them."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def logits(policy: OpenVLAPolicy, probe: tuple[OpenVLAInputs, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval().score(*probe).logits


def test_a_fresh_adapter_changes_nothing_and_is_all_that_is_trained(base, probe):
    policy = adapted(base)
    assert torch.equal(logits(policy, probe), logits(load_policy(base), probe))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    policy.train().score(*probe).logits.sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad), "an adapter that nothing reaches"


def test_all_linear_is_every_layer_that_is_computed_but_the_head(base):
    policy = load_policy(base)
    names = policy.linear_names
    assert "language_model.lm_head" not in names
    assert "projector.fc3" in names
    assert "vision_backbone.featurizer.blocks.3.attn.qkv" in names
    assert not [n for n in names if ".blocks.4." in n or "attn_pool" in n], "the last block is never computed"
    assert len(names) == 2 * 4 * 4 + 3 + 3 * 7  # towers x blocks x layers, projector, language


def test_number_of_parameters_follows_from_the_rank(base):
    policy = adapted(base)
    weights = dict(load_policy(base).model.named_parameters())
    expected = sum(LORA.rank * sum(weights[f"{name}.weight"].shape) for name in policy.linear_names)
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == expected


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(4, None, 1.0), (32, None, 0.5), (8, 4, 0.5)])
def test_alpha_is_the_rank_and_16_at_most(base, rank, alpha, scale):
    policy = adapted(base, LoraConfig(enabled=True, rank=rank, alpha=alpha))
    layer = policy.model.projector.fc1
    assert layer.scaling["default"] == scale


def as_pefts(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """The same weights in peft's own layers."""
    for module in policy.modules():
        if isinstance(module, LoraLinear):
            module.__class__ = PeftLinear
    return policy


def test_our_layer_gives_what_pefts_own_gives(base, probe):
    policy = disturb(adapted(base))
    ours = logits(policy, probe)
    logit_judge(as_pefts(policy), *probe).check(ours)


def test_gradients_equal_pefts_own(base, probe):
    ours, theirs = disturb(adapted(base)), as_pefts(disturb(adapted(base)))

    def gradients(policy: OpenVLAPolicy) -> dict[str, torch.Tensor]:
        policy.zero_grad()
        policy.score(*probe).logits.square().mean().backward()
        return gradients_of(policy)

    check_gradients(gradients(ours), exactly(theirs, gradients), gradients(theirs))


def test_adapters_stay_float32_on_a_bfloat16_base(base, probe):
    policy = load_policy(base, dtype="bfloat16")
    policy.prepare_training(ModelConfig(dtype="bfloat16"), LORA, seed=0)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert policy.model.projector.fc1.base_layer.weight.dtype == torch.bfloat16
    policy.train().score(*probe).logits.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}


def test_training_all_weights_in_bfloat16_is_refused(base):
    policy = load_policy(base, dtype="bfloat16")
    with pytest.raises(
        UsageError, match=r"policy.dtype = 'bfloat16' without adapters.*set lora.enabled, or policy.dtype"
    ):
        policy.prepare_training(ModelConfig(dtype="bfloat16"), LoraConfig(), seed=0)


def test_named_modules_alone_are_adapted(base):
    policy = adapted(base, LoraConfig(enabled=True, rank=4, target_modules=("q_proj", "v_proj")))
    trained = {n.split(".lora_")[0].rpartition(".")[2] for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


def test_a_name_that_no_layer_has_is_refused_with_those_there_are(base):
    with pytest.raises(UsageError, match=r"no linear layer's name ends in 'qproj'; use all-linear or .*q_proj"):
        adapted(base, LoraConfig(enabled=True, target_modules=("qproj",)))


def test_frozen_vision_gets_no_adapters(base):
    policy = adapted(base, freeze="vision")
    assert not [n for n, p in policy.named_parameters() if p.requires_grad and "vision_backbone" in n]
    assert [n for n, p in policy.named_parameters() if p.requires_grad and "language_model" in n]


def test_dropout_acts_in_training_only(base, probe):
    policy = disturb(adapted(base, LoraConfig(enabled=True, rank=4, dropout=0.5)))
    quiet = logits(policy, probe)
    assert torch.equal(logits(policy, probe), quiet)
    torch.manual_seed(0)
    with torch.no_grad():
        assert not torch.allclose(policy.train().score(*probe).logits, quiet, atol=1e-4)


def test_seed_decides_the_start(base):
    a, b, other = (load_policy(base) for _ in range(3))
    for policy, seed in ((a, 0), (b, 0), (other, 1)):
        policy.prepare_training(ModelConfig(), LORA, seed)
    pick = "model.projector.fc1.lora_A.default.weight"
    first, same, different = (dict(p.named_parameters())[pick] for p in (a, b, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


def test_saved_and_loaded_adapter_gives_the_same_logits_bit_for_bit(base, probe, tmp_path):
    policy = disturb(adapted(base))
    policy.save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists(), "an adapter folder does not repeat its base"
    assert torch.equal(logits(load_policy(tmp_path), probe), logits(policy, probe))
    assert torch.equal(logits(adapted(base, LoraConfig(adapter=str(tmp_path))), probe), logits(policy, probe))


def test_folder_is_pefts_own_with_the_originals_names(base, tmp_path):
    adapted(base).save(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (content["peft_type"], content["r"], content["lora_alpha"]) == ("LORA", 4, 4)
    assert content["base_model_name_or_path"] == str(base.resolve())
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.vision_backbone.featurizer.blocks.0.attn.qkv.lora_B.weight" in names


def test_an_adapter_without_our_files_is_read(base, probe, tmp_path):
    """As the original's trainer leaves it: peft's two files, nothing else."""
    policy = disturb(adapted(base))
    policy.save(tmp_path)
    for path in tmp_path.iterdir():
        if not path.name.startswith("adapter_"):
            path.unlink()
    assert torch.equal(logits(load_policy(tmp_path), probe), logits(policy, probe))


def test_an_adapter_of_other_weights_names_its_base(base, tmp_path):
    adapted(base).save(tmp_path / "adapter")
    init_tiny("autoregressive", seed=2).save(tmp_path / "other")
    with pytest.raises(UsageError) as error:
        load_policy(tmp_path / "adapter", base=str(tmp_path / "other"))
    assert f"was trained on {base.resolve()}" in str(error.value)
    assert "other holds other weights" in str(error.value)


def test_an_adapter_of_another_shape_names_its_base_and_the_tensors(base, tmp_path):
    adapted(base).save(tmp_path)
    (tmp_path / "base.json").unlink()
    state = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.projector.fc1.lora_A.weight"
    state[name] = torch.zeros(4, 3)
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UsageError) as error:
        load_policy(tmp_path)
    assert f"was trained on {base.resolve()}" in str(error.value)
    assert "projector.fc1.lora_A.weight is (4, 3) for (4, 256)" in str(error.value)


def test_a_moved_base_is_given_by_hand(base, probe, tmp_path):
    policy = disturb(adapted(base))
    policy.save(tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="gone is not a checkpoint"):
        load_policy(tmp_path / "adapter")
    assert torch.equal(logits(load_policy(tmp_path / "adapter", base=str(base)), probe), logits(policy, probe))


def test_fingerprint_ignores_shards_and_precision_but_not_values(base, tmp_path):
    policy = load_policy(base)
    policy.save(tmp_path / "bf16", torch.bfloat16)
    policy.save(tmp_path / "shards", max_shard_bytes=2_000_000)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    prints = {adapters.fingerprint(folder) for folder in (base, tmp_path / "bf16", tmp_path / "shards")}
    assert len(prints) == 1
    policy.model.projector.fc1.weight.data[0, 0] += 1
    policy.save(tmp_path / "changed")
    assert adapters.fingerprint(tmp_path / "changed") not in prints


def test_fold_gives_the_same_logits_and_a_plain_model(base, probe):
    policy = disturb(adapted(base))
    before, judge = logits(policy, probe), logit_judge(policy, *probe)
    assert not torch.allclose(before, logits(load_policy(base), probe), atol=1e-3)
    policy.fold_adapter()
    judge.check(logits(policy, probe))
    assert not [name for name, _ in policy.named_parameters() if "lora" in name or "base_layer" in name]


def test_two_adapters_at_once_are_refused(base, tmp_path):
    adapted(base).save(tmp_path)
    policy = load_policy(tmp_path)
    with pytest.raises(UsageError, match="policy.path is an adapter itself"):
        policy.prepare_training(ModelConfig(), LoraConfig(adapter=str(tmp_path)), seed=0)


def test_critic_travels_with_the_adapter(base, tmp_path, probe):
    policy = adapted(base)
    policy.attach_value_head((16,), seed=3)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert torch.equal(loaded.values(probe[0]), policy.values(probe[0]))
    assert loaded.value_head.out.weight.requires_grad


@pytest.mark.parametrize(
    "extra", [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"modules_to_save": ["x"]}]
)
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(base, tmp_path, extra):
    adapted(base).save(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text()) | extra
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=f"more than LoRA .{next(iter(extra))} = "):
        load_policy(tmp_path)


def test_a_base_that_changes_or_goes_under_a_run_does_not_change_what_is_recorded(base, tmp_path):
    init_tiny("autoregressive", seed=1).save(tmp_path / "base")
    policy = adapted(tmp_path / "base")
    known = adapters.fingerprint(tmp_path / "base")
    init_tiny("autoregressive", seed=2).save(tmp_path / "base")
    policy.save(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "base.json").read_text())["fingerprint"] == known
    with pytest.raises(UsageError, match="holds other weights"):
        load_policy(tmp_path / "adapter")


def test_frozen_vision_holds_for_loaded_adapters_too(base, tmp_path):
    adapted(base).save(tmp_path)
    policy = load_policy(tmp_path)
    policy.prepare_training(ModelConfig(freeze="vision"), LoraConfig(), seed=0)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and not [name for name in trained if "vision_backbone" in name]


def test_a_folded_policy_saved_over_its_adapter_is_whole(base, tmp_path, probe):
    disturb(adapted(base)).save(tmp_path)
    policy = load_policy(tmp_path)
    judge = logit_judge(policy, *probe)
    policy.fold_adapter()
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    assert not again.has_adapter
    judge.check(logits(again, probe))


def test_a_loaded_policy_does_not_drop_anything_out(base, tmp_path, observation):
    disturb(adapted(base, LoraConfig(enabled=True, rank=4, dropout=0.5))).save(tmp_path)
    policy, seen = load_policy(tmp_path), observation(0)
    first, second = (policy.score(policy.process([seen]), torch.full((1, 7), 800)).logits for _ in range(2))
    assert torch.equal(first, second)
