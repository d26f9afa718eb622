"""What a sync sends: names of the checkpoint, whole layers, adapters as adapters, buckets of bounded size."""

import pytest
import torch
from safetensors.torch import load

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.weights.buckets import buckets
from vlarl.weights.stream import WeightStream, check_shapes, group_of, weights_to_send

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


def test_names_are_those_of_the_checkpoint_and_the_heads_stay():
    policy = load_policy("builtin:tiny-oft")
    policy.attach_value_head((8,), seed=0)
    policy.attach_l1_head(seed=0)
    expected = dict(policy.model.named_parameters())
    expected |= {f"proprio_projector.{n}": p for n, p in policy.proprio_projector.named_parameters()}
    assert policy.engine_weights() == expected


def test_adapters_are_sent_as_they_are_and_nothing_else_is():
    """In float32, whatever the engine's type: the sum with a bfloat16 weight would round most of an update away."""
    policy = with_adapter("q_proj", "down_proj", "fc1")
    expected = {
        name.replace(".default", "").removeprefix("model."): parameter
        for name, parameter in policy.named_parameters()
        if ".lora_" in name
    }
    sent = dict(weights_to_send(policy, torch.bfloat16))
    assert list(sent) == list(expected) and f"{LAYER}.self_attn.q_proj.lora_B.weight" in sent
    assert all(torch.equal(sent[name], expected[name]) and sent[name].dtype == torch.float32 for name in expected)


def test_frozen_adapters_are_sent_too():
    """An engine that starts from the base has none of them."""
    policy = with_adapter("q_proj", "fc1")
    expected = list(weights_to_send(policy).shapes)
    policy.model.vision_backbone.requires_grad_(False)
    assert list(weights_to_send(policy).shapes) == expected and any("vision" in name for name in expected)


def test_what_training_changes_is_sent_with_the_rest_of_its_layer_in_the_engines_type():
    policy = load_policy(BUILTIN)
    frozen = set(policy.engine_weights()) - set(weights_to_send(policy).shapes)
    assert frozen and all(".blocks.4." in n or ".norm." in n or "attn_pool" in n for n in frozen)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name.endswith("q_proj.weight"))
    sent = dict(weights_to_send(policy, torch.bfloat16))
    assert set(sent) == {
        f"language_model.model.layers.{i}.self_attn.{part}_proj.weight" for i in range(3) for part in ("q", "k", "v")
    }
    assert all(torch.equal(weight, policy.engine_weights()[name].bfloat16()) for name, weight in sent.items())


def test_the_order_is_that_of_the_policy():
    """Ranks gather the tensors together, one by one: the order of a set would differ between their processes."""
    policy = load_policy(BUILTIN)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("layers.1." in name or "projector" in name)
    sent = weights_to_send(policy)
    assert list(sent.shapes) == [name for name, _ in sent]
    assert list(sent.shapes) == [n for n, p in policy.engine_weights().items() if p.requires_grad]
    assert len(sent.shapes) > 10


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
    with pytest.raises(UsageError, match="bucket_bytes = 0"):
        next(buckets(stream, 0))


def test_a_tensor_larger_than_a_bucket_gets_its_own():
    sizes = {"a": 1000, "big": 5000, "c": 1000, "d": 1000, "e": 1000}  # float32; a bucket holds 2000
    stream = WeightStream({name: (size,) for name, size in sizes.items()}, lambda name: torch.ones(sizes[name]))
    assert [set(load(part)) for part in buckets(stream, 8000)] == [{"a"}, {"big"}, {"c", "d"}, {"e"}]


def test_adapters_and_weights_of_the_model_are_never_in_one_bucket():
    names = ["a.weight", "b.lora_A.weight", "b.lora_B.weight", "c.weight"]
    stream = WeightStream({name: (2,) for name in names}, lambda name: torch.ones(2))
    assert [sorted(load(part)) for part in buckets(stream, 8000)] == [names[:1], names[1:3], names[3:]]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.v_proj.bias", f"{LAYER}.self_attn.qkv_proj"),
        (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.self_attn.o_proj"),
        (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.gate_up_proj"),
        (f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_A.weight"),
        ("q_proj.weight", "qkv_proj"),
        ("vision_backbone.featurizer.pos_embed", "vision_backbone.featurizer"),
        ("projector.fc1.bias", "projector.fc1"),
    ],
)
def test_groups_are_the_engines_layers(name, group):
    assert group_of(name) == group


def test_everything_that_does_not_fit_is_named():
    known = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4,)}
    check_shapes({"b.weight": (4,)}, known)
    check_shapes(known, known, ["a.weight"])
    with pytest.raises(
        UsageError,
        match=r"c\.weight is not a weight .*; a\.weight has shape \(3, 2\), the engine's \(2, 3\); a\.bias is missing",
    ):
        check_shapes({"a.weight": (3, 2), "c.weight": (1,)}, known)
    with pytest.raises(UsageError, match=r"a\.bias is missing, and the engine can't act without it"):
        check_shapes({"b.weight": (4,)}, known, ["a.bias", "b.weight"])
