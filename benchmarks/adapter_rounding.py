"""How much of a LoRA adapter's effect a bfloat16 policy shows after a few optimizer steps. Prints a table.

    python benchmarks/adapter_rounding.py [--model builtin:tiny-oft] [--device cuda] [--steps 1 4 20 100] [--rows 128]

Adapters of rank 32 (scale 0.5) on every linear layer are trained at lr 2e-5. After each number of steps, three ways to
apply them to a bfloat16 base are compared with exact arithmetic:

    added afterwards    to the frozen layer's output, which is already rounded (peft's layer; vlarl's until 0.1)
    one rounding        vlarl's layer: the sum is rounded once
    folded              into the bfloat16 weights (`vlarl merge --dtype bfloat16`, a sync to a bfloat16 engine)

The result is the regression slope of the measured change on the exact change, over all values: 1 is all of it, 0 is
none. *Layers*: each layer's output against float64 on the same inputs; for *folded*, its weights. *Log-probs*: those of
sampled tokens at temperature 1.6 against the same policy in float32, with the standard error of the slope.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import nn

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.adapters import fraction_kept
from vlarl.policies.distribution import token_logprobs
from vlarl.policies.load import load_policy
from vlarl.policies.lora import LoraLinear
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.types import Observation

LORA = LoraConfig(enabled=True, rank=32)
LEARNING_RATE = 2e-5
TEMPERATURE = 1.6
TRAINED_ROWS = 16
PASS_ROWS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny-oft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 20, 100])
    parser.add_argument("--rows", type=int, default=128, help="decisions whose log-probs are compared")
    given = parser.parse_args()
    policy, exact = (adapted(given.model, dtype, given.device) for dtype in ("bfloat16", "float32"))
    copy_trained(policy, exact)
    inputs, tokens = decisions(exact, given.rows)
    start, exact_start = logprobs(policy, inputs, tokens), logprobs(exact, inputs, tokens)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    print("steps  way               layers  log-probs")
    done = 0
    for steps in given.steps:
        train(policy, optimizer, inputs, tokens, steps - done)
        done = steps
        copy_trained(policy, exact)
        expected = logprobs(exact, inputs, tokens) - exact_start
        for way, layers, moved in measured(policy, inputs, tokens):
            fraction, error = slope(moved - start, expected)
            print(f"{steps:5}  {way:16}  {layers:6.3f}  {fraction:6.3f} ± {error:.3f}", flush=True)


def measured(
    policy: OpenVLAPolicy, inputs: OpenVLAInputs, tokens: torch.Tensor
) -> Iterator[tuple[str, float, torch.Tensor]]:
    """Each way, the fraction of the change that its layers show, and its log-probs."""
    with as_peft(policy):
        yield "added afterwards", layer_fraction(policy, inputs, tokens), logprobs(policy, inputs, tokens)
    yield "one rounding", layer_fraction(policy, inputs, tokens), logprobs(policy, inputs, tokens)
    folded = copy.deepcopy(policy)
    folded.fold_adapter()
    yield "folded", fraction_kept(policy.model, torch.bfloat16), logprobs(folded, inputs, tokens)


def adapted(model: str, dtype: str, device: str) -> OpenVLAPolicy:
    """The model with fresh adapters; in float32 it has the values of the bfloat16 weights."""
    policy = load_policy(model, dtype=dtype, device=device)  # type: ignore[arg-type]
    policy.prepare_training(ModelConfig(dtype=dtype), LORA, seed=0)  # type: ignore[arg-type]
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data.copy_(parameter.data.bfloat16())
    return policy.eval()


def decisions(policy: OpenVLAPolicy, rows: int) -> tuple[OpenVLAInputs, torch.Tensor]:
    """Observations with noise for images, and tokens [rows, K*D] that the policy samples for them."""
    rng = np.random.default_rng(0)
    config = policy.config
    shape = (config.num_images, config.image_size, config.image_size, 3)
    observations = [
        Observation(
            rng.integers(0, 256, shape, dtype=np.uint8),
            rng.uniform(-1, 1, config.proprio_dim).astype(np.float32),
            ("open the drawer", "pick up the red cube", "put the bowl on the plate")[row % 3],
        )
        for row in range(rows)
    ]
    inputs = policy.process(observations)
    first = policy.codec.first_id
    tokens = torch.full((rows, config.num_action_tokens), first)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in pieces(rows):
            logits = policy.score(inputs.rows(part), tokens[part]).logits.cpu() / TEMPERATURE
            flat = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator)
            tokens[part] = first + flat.view(len(tokens[part]), -1)
    return inputs, tokens


def train(
    policy: OpenVLAPolicy, optimizer: torch.optim.Optimizer, inputs: OpenVLAInputs, tokens: torch.Tensor, steps: int
) -> None:
    """Policy-gradient steps on a few decisions with random advantages."""
    rows = slice(0, TRAINED_ROWS)
    advantages = torch.randn(len(tokens[rows]), 1, generator=torch.Generator().manual_seed(1)).to(policy.device)
    for _ in range(steps):
        optimizer.zero_grad()
        chosen = (tokens[rows] - policy.codec.first_id).to(policy.device)
        logits = policy.score(inputs.rows(rows), tokens[rows]).logits
        torch.autograd.backward(-(advantages * token_logprobs(logits, chosen, TEMPERATURE)).mean())
        optimizer.step()
    policy.weights_changed()


@torch.no_grad()
def copy_trained(source: OpenVLAPolicy, target: OpenVLAPolicy) -> None:
    own = dict(target.named_parameters())
    for name, parameter in source.named_parameters():
        if parameter.requires_grad:
            own[name].copy_(parameter)
    target.weights_changed()


def pieces(rows: int) -> list[slice]:
    return [slice(start, start + PASS_ROWS) for start in range(0, rows, PASS_ROWS)]


@torch.no_grad()
def logprobs(policy: OpenVLAPolicy, inputs: OpenVLAInputs, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, K*D] float64, on the host."""
    parts = []
    for part in pieces(len(tokens)):
        chosen = (tokens[part] - policy.codec.first_id).to(policy.device)
        parts.append(token_logprobs(policy.score(inputs.rows(part), tokens[part]).logits, chosen, TEMPERATURE))
    return torch.cat(parts).double().cpu()


def slope(measured: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The least-squares slope through zero of one on the other, and its standard error."""
    square = expected.square().sum()
    found = (measured * expected).sum() / square
    noise = (measured - found * expected).square().mean().sqrt()
    return float(found), float(noise / square.sqrt())


def lora_linears(policy: nn.Module) -> dict[str, LoraLinear]:
    return {name: m for name, m in policy.named_modules() if isinstance(m, (LoraLinear, PeftLinear))}  # type: ignore[misc]


@torch.no_grad()
def layer_fraction(policy: OpenVLAPolicy, inputs: OpenVLAInputs, tokens: torch.Tensor) -> float:
    """The slope over the outputs of all adapted layers, each on its inputs in a pass over a few rows."""
    sums = torch.zeros(2, dtype=torch.float64)

    def watch(layer: LoraLinear) -> Callable[..., None]:
        def hook(_module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = given[0]
            plain = nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias)
            into, out = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
            expected = x.double() @ into.t() @ out.t() * layer.scaling["default"]
            change = output.double() - plain.double()
            sums.add_(torch.stack([(change * expected).sum(), expected.square().sum()]).cpu())

        return hook

    handles = [layer.register_forward_hook(watch(layer)) for layer in lora_linears(policy).values()]
    policy.score(inputs.rows(slice(0, 4)), tokens[:4])
    for handle in handles:
        handle.remove()
    return float(sums[0] / sums[1])


@contextmanager
def as_peft(policy: nn.Module) -> Iterator[None]:
    """Inside the block the layers compute like peft's own."""
    layers = list(lora_linears(policy).values())
    for layer in layers:
        layer.__class__ = PeftLinear  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = LoraLinear


if __name__ == "__main__":
    main()
