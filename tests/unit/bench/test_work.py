"""Counts of operations and bytes, against torch's own counter and against sums by hand; and the peer's tokens."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlarl.bench.rollout import equal_tokens
from vlarl.bench.timing import Rates
from vlarl.bench.update import logprob_difference, random_batch
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.bench_model import Work
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.work import OpenVLAWork
from vlarl.rollout.engines.torch import TorchEngine

MODELS = ("builtin:tiny-openvla", "init:tiny-oft")
ROWS = 3


def policy_of(name: str, rank: int | None = None, dtype: Any = "float32", recompute: bool = False) -> Any:
    policy = load_policy(name, dtype=dtype)
    settings = ModelConfig(dtype=dtype, gradient_checkpointing=recompute)
    lora = LoraConfig(enabled=rank is not None, rank=rank or 1)
    if rank is not None or dtype == "float32":
        policy.prepare_training(settings, lora, seed=0)
    return policy.eval()


def counted(work: Any) -> int:
    """Operations by torch's counter, which does not know CPU attention and `addmm_` by itself."""
    in_place = {torch.ops.aten.addmm_: lambda out, a, b, *_, out_shape=None, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [None, 8])
def test_operations_of_a_pass_are_those_that_torch_counts(name, rank):
    policy = policy_of(name, rank, "bfloat16")  # in float32 tokens are scored once more, which is not counted
    model = policy.bench_model()
    inputs, decisions = model.inputs(ROWS, seed=0), model.decisions(ROWS, seed=0)
    sampling = Sampling(temperature=1.0)
    noise = policy.noise([0] * ROWS, sampling)
    generation = sum(work.flops for work in model.generation_work(ROWS, rank))
    assert counted(lambda: policy.sample(inputs, noise, sampling)) == pytest.approx(generation, rel=0.01)
    with torch.no_grad():
        scored = counted(lambda: policy.evaluate(inputs, decisions, 1.0))
    work = OpenVLAWork(policy.config, "bfloat16")
    assert scored == pytest.approx(work.scoring(ROWS, rank).flops, rel=0.01)
    if (prefill := model.prefill_work(ROWS, rank)) is not None:
        assert counted(lambda: model.prefill(inputs)) == pytest.approx(prefill[0].flops, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("rank", "recompute", "tolerance"), [(None, False, 0.02), (None, True, 0.02), (8, False, 0.03)]
)
def test_operations_of_an_update_are_those_that_torch_counts(name, rank, recompute, tolerance):
    """The gradient of the first layer's input, which nothing needs, is in our count."""
    policy = policy_of(name, rank, recompute=recompute)
    model = policy.bench_model()
    inputs, decisions = model.inputs(ROWS, seed=0), model.decisions(ROWS, seed=0)
    policy.train()
    found = counted(lambda: policy.evaluate(inputs, decisions, 1.0).logprobs.sum().backward())
    (work,) = model.update_work(ROWS, rank, recompute)
    assert found == pytest.approx(work.flops, rel=tolerance)


def openvla_7b(decoder: str) -> OpenVLAWork:
    raw = {
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "use_fused_vision_backbone": True,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "image_sizes": [224, 224],
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "norm_stats": {},
    }
    return OpenVLAWork(parse_config(raw).with_decoder(decoder), "bfloat16")


def test_the_7b_has_the_work_that_its_sizes_say():
    """By hand: weights of Llama-2-7B's layers, and the keys and values of 294 columns."""
    first, *steps = openvla_7b("autoregressive").generation(64, None)
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    cache = 64 * (288 + 5) * 32 * 2 * 4096
    assert len(steps) == 6
    assert steps[-1].num_bytes == 2 * (layers + 256 * 4096 + cache)
    assert 2 * 7.2e9 < first.num_bytes < 2 * 7.55e9  # all but embedding, head and what is never computed
    assert first.flops / 64 == pytest.approx(4.1e12, rel=0.01)


def test_a_pass_takes_as_long_as_the_slower_of_computing_and_reading():
    rates = Rates(flops_per_s=100.0, bytes_per_s=10.0)
    assert rates.floor([Work(flops=500, num_bytes=20), Work(flops=100, num_bytes=70)]) == 5.0 + 7.0


@pytest.mark.parametrize("name", MODELS)
def test_the_peer_computes_the_same_function_on_the_same_memory(name):
    policy = policy_of(name)
    model = policy.bench_model()
    peer = model.peer()
    inputs = model.inputs(8, seed=1)
    ours = TorchEngine(policy, torch.device("cpu")).generate(inputs, Sampling(temperature=0.0), list(range(8)))
    assert equal_tokens(model.tokens(ours), peer.generate(inputs)) == 1.0
    own = policy.model.language_model.model.layers[0].mlp.up_proj.weight
    assert peer.language.model.layers[0].mlp.up_proj.weight.data_ptr() == own.data_ptr()
    before = own.detach().clone()
    trainer = peer.trainer(rank=4)
    batch = random_batch(model, 2, seed=3)
    assert logprob_difference(policy, trainer.logprobs(batch.inputs, batch.decisions)) < 1e-3
    losses = [trainer.update(batch.inputs, batch.decisions, microbatch_size=1) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert torch.equal(own, before)  # adapters alone are trained


def test_a_peer_of_a_policy_with_adapters_is_refused():
    with pytest.raises(UsageError, match="before the policy has adapters"):
        policy_of(MODELS[1], rank=4).bench_model().peer()


def test_tokens_after_a_difference_are_not_compared():
    ours = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    theirs = torch.tensor([[1, 2, 3, 4], [1, 9, 8, 4]])
    assert equal_tokens(ours, theirs) == pytest.approx(
        5 / 6
    )  # four of the first row; one equal and one different of the second
