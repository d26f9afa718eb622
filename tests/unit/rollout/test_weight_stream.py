"""What a sync sends: names of the checkpoint, whole layers, adapters folded in, buckets of bounded size."""

import pytest
import torch
from fakes.float_error import FloatJudge, exactly
from safetensors.torch import load

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.weights.stream import (
    ChangedWeights,
    WeightStream,
    buckets,
    check_shapes,
    group_of,
    policy_weights,
    trained_names,
)

BUILTIN = "builtin:tiny-openvla"
LAYER = "language_model.model.layers.0"


def with_adapter(*targets: str) -> OpenVLAPolicy:
    policy = load_policy(BUILTIN)
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=4, target_modules=targets), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def test_names_are_those_of_the_checkpoint_and_the_critic_stays():
    policy = load_policy(BUILTIN)
    policy.attach_value_head((8,), seed=0)
    expected = dict(policy.model.named_parameters())
    expected |= {f"proprio_projector.{n}": p for n, p in policy.proprio_projector.named_parameters()}
    stream = dict(policy_weights(policy))
    assert list(stream) == list(expected)
    assert all(torch.equal(stream[name], expected[name]) for name in expected)


def test_a_folded_stream_is_the_folded_policy_and_leaves_the_learners_alone():
    policy = with_adapter("q_proj", "down_proj", "fc1")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    sent = dict(policy_weights(policy))
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())

    def fold(folding: OpenVLAPolicy) -> dict[str, torch.Tensor]:
        folding.fold_adapter()
        return dict(policy_weights(folding))

    exact, folded = exactly(policy, fold), fold(policy)
    assert list(sent) == list(folded)
    for name in folded:
        FloatJudge.of(exact[name], folded[name]).check(sent[name])
    changed = {n for n, p in load_policy(BUILTIN).model.named_parameters() if not torch.equal(p, sent[n])}
    assert f"{LAYER}.self_attn.q_proj.weight" in changed and f"{LAYER}.self_attn.k_proj.weight" not in changed


def test_what_training_changes_is_sent_with_the_rest_of_its_layer():
    names = trained_names(with_adapter("q_proj"))
    assert names == {
        f"language_model.model.layers.{i}.self_attn.{part}_proj.weight" for i in range(3) for part in ("q", "k", "v")
    }
    whole = load_policy(BUILTIN)
    frozen = set(policy_weights(whole).shapes) - trained_names(whole)
    assert frozen and all(".blocks.4." in n or ".norm." in n or "attn_pool" in n for n in frozen)


def test_a_part_of_the_stream_keeps_the_order_of_the_whole():
    """Ranks gather the tensors together, one by one: the order of a set would differ between their processes."""
    policy = load_policy(BUILTIN)
    whole = list(policy_weights(policy).shapes)
    names = set(whole[::3])
    part = policy_weights(policy).only(names)
    assert list(part.shapes) == [name for name, _ in part] == whole[::3]
    trained = trained_names(policy)
    changed = list(ChangedWeights(policy, engine_has_base=True).next().shapes)
    assert changed == [name for name in whole if name in trained] and len(changed) > 20


def test_the_base_is_sent_once():
    policy = with_adapter("q_proj")
    changed = ChangedWeights(policy, engine_has_base=False)
    everything = set(policy_weights(policy).shapes)
    assert set(changed.next().shapes) == everything  # and again, until the engine has it
    assert set(changed.next().shapes) == everything
    changed.sent()
    assert set(changed.next().shapes) == trained_names(policy)
    changed.forget()
    assert set(changed.next().shapes) == everything
    assert set(ChangedWeights(policy, engine_has_base=True).next().shapes) == trained_names(policy)


def test_buckets_are_bounded_and_made_one_at_a_time():
    alive = []

    def make(name: str) -> torch.Tensor:
        alive.append(name)
        return torch.full((1000,) if name != "big" else (5000,), float(len(alive)))

    stream = WeightStream({"a": (1000,), "b": (1000,), "big": (5000,), "c": (1000,)}, make)
    parts = buckets(stream, 8000)
    first = load(next(parts))
    assert set(first) == {"a", "b"} and alive == ["a", "b", "big"]  # the one that no longer fits is made already
    rest = [load(part) for part in parts]
    assert [set(part) for part in rest] == [{"big"}, {"c"}]
    assert torch.equal(rest[1]["c"], torch.full((1000,), 4.0))
    halved = load(next(buckets(stream, 8000, torch.bfloat16)))
    assert halved["a"].dtype == torch.bfloat16
    with pytest.raises(UsageError, match="bucket_bytes = 0"):
        next(buckets(stream, 0))


def test_a_tensor_larger_than_a_bucket_gets_its_own():
    sizes = {"a": 1000, "big": 5000, "c": 1000, "d": 1000, "e": 1000}  # float32; a bucket holds 2000
    stream = WeightStream({name: (size,) for name, size in sizes.items()}, lambda name: torch.ones(sizes[name]))
    assert [set(load(part)) for part in buckets(stream, 8000)] == [{"a"}, {"big"}, {"c", "d"}, {"e"}]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.v_proj.bias", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.o_proj"),
        (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.gate_up_proj"),
        ("vision_backbone.featurizer.pos_embed", "vision_backbone.featurizer"),
        ("projector.fc1.bias", "projector.fc1"),
    ],
)
def test_groups_are_the_engines_layers(name, group):
    assert group_of(name) == group


def test_everything_that_does_not_fit_is_named():
    known = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4,)}
    check_shapes({"b.weight": (4,)}, known)
    check_shapes(known, known, whole=True)
    with pytest.raises(
        UsageError,
        match=r"c\.weight is not a weight .*; a\.weight has shape \(3, 2\), the engine's \(2, 3\); a\.bias is missing",
    ):
        check_shapes({"a.weight": (3, 2), "c.weight": (1,)}, known)
    with pytest.raises(UsageError, match=r"a\.weight is missing.*a\.bias is missing"):
        check_shapes({"b.weight": (4,)}, known, whole=True)
