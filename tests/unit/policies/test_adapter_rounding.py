"""LoRA layers against float64: their scale, their gradients, and what bfloat16 leaves of a small adapter."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies import adapters, lora
from vlarl.policies.load import load_policy
from vlarl.policies.lora import LoraLinear
from vlarl.training.fsdp import _part_from_others
from vlarl.training.optim import build_adamw

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import adapter_rounding  # noqa: E402

SCALES = [(32, None, 0.5), (8, 16, 2.0), (6, 15, 2.5)]  # rank, alpha, scale; a rank that has to be padded
EARLY = 8e-5  # B after four steps at lr 2e-5, about


class Layers(nn.Module):
    """Two linear layers, one of them with a bias."""

    def __init__(self, size_in: int = 96, size_out: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.plain = nn.Linear(size_in, size_out, bias=False)
        self.biased = nn.Linear(size_in, size_out)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def adapted(rank: int, alpha: int | None, dtype: torch.dtype, size: float, dropout: float = 0.0) -> Layers:
    """Adapters whose B is of the given size, beside layers in the given type."""
    model = Layers().to(dtype)
    config = LoraConfig(enabled=True, rank=rank, alpha=alpha, dropout=dropout)
    lora.add_fresh(model, config, ["plain", "biased"], "nothing", seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator).sign())
    return model


def exact(layer: LoraLinear, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's own output and its adapter's, in float64, by the formula."""
    base = layer.base_layer
    own = x.double() @ base.weight.detach().double().t()
    if base.bias is not None:
        own = own + base.bias.detach().double()
    into, out = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    return own, scale * (x.double() @ into.t() @ out.t())


def seen_fraction(layer: LoraLinear, scale: float, rows: int = 4096, **autocast: torch.dtype) -> float:
    """How much of the adapter's output is seen in the layer's, as a slope over all values."""
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(3)).to(layer.base_layer.weight.dtype)
    with torch.no_grad(), torch.autocast("cpu", enabled=bool(autocast), **autocast):
        if autocast:
            x = x.to(autocast["dtype"]).to(x.dtype)
        moved = layer(x).double() - layer.base_layer(x).double()
        _, expected = exact(layer, x, scale)
    return float((moved * expected).sum() / expected.square().sum())


@pytest.mark.parametrize("name", ["plain", "biased"])
@pytest.mark.parametrize(("rank", "alpha", "scale"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_is_the_formulas_with_its_scale(rank, alpha, scale, name, dtype):
    layer = getattr(adapted(rank, alpha, dtype, size=0.05), name)
    x = torch.randn(5, 3, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    own, delta = exact(layer, x, scale)
    assert float(delta.abs().max()) > 0.2, "the adapter does something"
    # each of the few roundings (x A', A, B, the sum) is half a unit in the last place of its terms' size
    allowed = 4 * torch.finfo(dtype).eps * float((own.abs() + delta.abs()).max())
    assert float((layer(x).double() - own - delta).abs().max()) <= allowed


@pytest.mark.parametrize("name", ["plain", "biased"])
@pytest.mark.parametrize(("rank", "alpha", "scale"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_formulas_with_its_scale(rank, alpha, scale, name, dtype):
    layer = getattr(adapted(rank, alpha, dtype, size=0.05), name)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 96, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(16, 64, generator=generator).to(dtype)
    layer(x).backward(grad)
    into, out = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    wide_x = x.detach().double().requires_grad_()
    twin_into, twin_out = (p.detach().double().requires_grad_() for p in (into, out))
    own = wide_x @ layer.base_layer.weight.double().t()
    (own + scale * (wide_x @ twin_into.t() @ twin_out.t())).backward(grad.double())
    for found, judge in ((x, wide_x), (into, twin_into), (out, twin_out)):
        error = float((found.grad.double() - judge.grad).norm() / judge.grad.norm())
        assert error <= 8 * torch.finfo(dtype).eps
    assert into.grad.dtype == out.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["plain", "biased"])
@pytest.mark.parametrize(("rank", "alpha", "scale"), SCALES)
def test_a_small_adapter_is_not_rounded_away(rank, alpha, scale, name):
    layer = getattr(adapted(rank, alpha, torch.bfloat16, EARLY / scale), name)
    assert seen_fraction(layer, scale) == pytest.approx(1, abs=0.05)
    layer.__class__ = layer.__class__.__base__  # peft's own: what this test would see if it were
    assert seen_fraction(layer, scale) < 0.5


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_nor_under_autocast(name):
    layer = getattr(adapted(32, None, torch.float32, EARLY), name)
    assert seen_fraction(layer, 0.5, dtype=torch.bfloat16) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_nor_where_the_adapter_comes_in_bfloat16_as_sharded_ones_do(name):
    layer = getattr(adapted(32, None, torch.bfloat16, EARLY), name)
    layer.lora_A.bfloat16()
    layer.lora_B.bfloat16()
    assert seen_fraction(layer, 0.5) == pytest.approx(1, abs=0.05)


def test_dropout_drops_the_adapters_input_alone():
    layer = adapted(8, 4, torch.bfloat16, 0.05, dropout=0.5).train().plain
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x.detach(), 0.5)
    torch.manual_seed(0)
    output = layer(x)
    own, _ = exact(layer, x.detach(), 0.5)
    _, delta = exact(layer, dropped, 0.5)
    assert float((output.double() - own - delta).abs().max()) <= 4 * 2**-7 * float((own.abs() + delta.abs()).max())
    output.sum().backward()
    into, out = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    kept = (dropped != 0) * 2.0
    judge = layer.base_layer.weight.double().sum(0) + kept * (0.5 * (out.sum(0) @ into))
    assert float((x.grad.double() - judge).norm() / judge.norm()) <= 8 * 2**-7


def test_what_is_kept_follows_every_change_of_the_adapter():
    model = adapted(8, 4, torch.bfloat16, 0.05)
    layer = model.plain
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    wide = layer.operands(torch.bfloat16).wide
    optimizer = build_adamw([p for p in model.parameters() if p.requires_grad], 0.1, 0.0, (0.9, 0.999))

    def matches() -> bool:
        own, delta = exact(layer, x, 0.5)
        return float((layer(x).double() - own - delta).abs().max()) <= 4 * 2**-7 * float(
            (own.abs() + delta.abs()).max()
        )

    assert matches()
    before = layer(x)
    layer(x.clone().requires_grad_()).sum().backward()
    optimizer.step()
    assert matches() and not torch.equal(layer(x), before)
    layer.lora_B["default"].weight.data.fill_(0.3)  # behind the counter's back
    lora.refresh_operands(model)
    assert matches()
    assert layer.operands(torch.bfloat16).wide is wide, "a recorded pass reads from there"


def test_adapters_on_the_same_weight_each_have_their_own_say():
    """As a separate critic's: it shares what is frozen."""
    model = adapted(8, 4, torch.bfloat16, 0.05)
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    first = model.plain(x)
    other = copy.deepcopy(model, memo={id(p): p for p in model.parameters() if not p.requires_grad})
    with torch.no_grad():
        other.plain.lora_B["default"].weight.mul_(-1)
    own, delta = exact(model.plain, x, 0.5)
    allowed = 4 * 2**-7 * float((own.abs() + delta.abs()).max())
    for _ in range(2):  # in turn
        assert float((other.plain(x).double() - own + delta).abs().max()) <= allowed
        assert torch.equal(model.plain(x), first)
    assert other.plain.base_layer.weight.data_ptr() == model.plain.base_layer.weight.data_ptr()


def test_another_type_of_computation_in_between_changes_nothing():
    layer = adapted(8, 4, torch.bfloat16, 0.05).plain
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    first = layer(x)
    layer.operands(torch.float16)
    assert torch.equal(layer(x), first)
    with torch.no_grad():
        layer.lora_B["default"].weight.add_(1.0)
    own, delta = exact(layer, x, 0.5)
    assert float((layer(x).double() - own - delta).abs().max()) <= 4 * 2**-7 * float((own.abs() + delta.abs()).max())


def test_weights_can_be_sharded_after_a_pass():
    """FSDP takes contiguous ones only."""
    model = adapted(8, 4, torch.bfloat16, 0.05)
    model.plain(torch.ones(1, 96, dtype=torch.bfloat16))
    weight = model.plain.base_layer.weight.clone()
    assert not model.plain.base_layer.weight.is_contiguous()
    _part_from_others(model)
    assert model.plain.base_layer.weight.is_contiguous() and torch.equal(model.plain.base_layer.weight, weight)


def test_a_layer_that_moves_computes_the_same():
    model = adapted(8, 4, torch.bfloat16, 0.05)
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    first = model.plain(x)
    weight = model.plain.base_layer.weight
    weight.data = weight.data.clone()
    assert torch.equal(model.plain(x), first)


@pytest.mark.parametrize(("rank", "alpha", "scale"), SCALES)
def test_folding_scales_the_adapter(rank, alpha, scale, tmp_path):
    policy = load_policy("builtin:tiny-oft")
    policy.prepare_training(ModelConfig(), LoraConfig(enabled=True, rank=rank, alpha=alpha), seed=0)
    layer = policy.model.projector.fc1
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.01)
    into, out = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    before = layer.base_layer.weight.detach().double().clone()
    expected = before + scale * (out @ into).detach()
    assert policy.adapter_sizes()["projector.fc1"] == (rank, scale)
    policy.fold_adapter()
    found = policy.model.projector.fc1.weight
    assert float((found.double() - expected).abs().max()) <= 4 * torch.finfo(torch.float32).eps
    assert float((expected - before).abs().max()) > 1e-3


def test_log_probs_of_a_bfloat16_policy_move_as_those_in_float32():
    """After four optimizer steps at lr 2e-5: at least 0.95 of the movement, in the layers and in the log-probs."""
    policy, twin = (adapter_rounding.adapted("builtin:tiny-oft", dtype, "cpu") for dtype in ("bfloat16", "float32"))
    inputs, tokens = adapter_rounding.decisions(twin, rows=64)
    before = [adapter_rounding.logprobs(p, inputs, tokens) for p in (policy, twin)]
    optimizer = build_adamw([p for p in policy.parameters() if p.requires_grad], 2e-5, 0.0, (0.9, 0.999))
    adapter_rounding.train(policy, optimizer, inputs, tokens, steps=4)
    adapter_rounding.copy_trained(policy, twin)
    moved, expected = (
        adapter_rounding.logprobs(p, inputs, tokens) - start for p, start in zip((policy, twin), before, strict=True)
    )
    fraction, error = adapter_rounding.slope(moved, expected)
    assert error < 0.1, "enough log-probs to tell"
    assert fraction + 2 * error >= 0.95
    assert adapter_rounding.layer_fraction(policy, inputs, tokens) >= 0.95
    with adapter_rounding.as_peft(policy):
        lost = adapter_rounding.logprobs(policy, inputs, tokens) - before[0]
    assert adapter_rounding.slope(lost, expected)[0] < 0.5, "added to what is rounded already, most of it is lost"


def test_fraction_kept_is_what_the_folded_weights_hold():
    model = adapted(32, None, torch.bfloat16, EARLY)
    kept = {dtype: adapters.fraction_kept(model, dtype) for dtype in (torch.bfloat16, torch.float32)}
    layer = model.plain
    delta = layer.get_delta_weight("default").double()
    weight = layer.base_layer.weight.double()
    stored = (weight + delta).bfloat16().double()
    expected = float(((stored - weight) * delta).sum() / delta.square().sum())
    both = adapted(32, None, torch.bfloat16, EARLY)
    both.biased = both.biased.base_layer  # only one adapter is left
    assert adapters.fraction_kept(both, torch.bfloat16) == pytest.approx(expected, rel=1e-4)
    assert kept[torch.bfloat16] < 0.5
    assert kept[torch.float32] == pytest.approx(1, abs=1e-2)
    assert adapters.fraction_kept(adapted(8, 4, torch.bfloat16, 0.5), torch.bfloat16) == pytest.approx(1, abs=0.02)
    assert adapters.fraction_kept(adapted(8, 4, torch.bfloat16, 0.0), torch.bfloat16) == 1.0
