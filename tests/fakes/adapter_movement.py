"""How much of early updates of adapters an engine shows in the log-probs of what it samples.

bfloat16 rounds the log-probs of this small policy by more than four optimizer steps move them, and by much the same on
similar inputs. So several updates are made, each from the base and in a direction of its own. Even so the fraction is
known to a few hundredths only: that an engine adds all of an adapter, and not nine tenths of it, is seen in updates that
are much larger.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vlarl.decisions import Decisions, Sampling
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import adapter_rounding  # noqa: E402

MODEL = "builtin:tiny-openvla"
LORA = {"enabled": True, "rank": adapter_rounding.LORA.rank}
EARLY = adapter_rounding.LEARNING_RATE
LARGE = 20 * EARLY  # of updates that no rounding hides, and that are not yet so large that log-probs saturate
UPDATES = {EARLY: 12, LARGE: 3}  # by their learning rate
ROWS = 64  # of each update

Adapters = dict[str, torch.Tensor]
Generate = Callable[[OpenVLAInputs, Sampling, list[int]], Decisions]


def train(policy: OpenVLAPolicy, inputs: OpenVLAInputs, tokens: torch.Tensor, rate: float = EARLY) -> Adapters:
    """Four optimizer steps from adapters that change nothing; the adapters after them."""
    policy.reset_adapters(0)
    trained = {name: parameter for name, parameter in policy.named_parameters() if ".lora_" in name}
    optimizer = torch.optim.AdamW([*trained.values()], lr=rate, weight_decay=0.0)
    adapter_rounding.train(policy, optimizer, inputs, tokens, steps=4)
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


def fraction_moved(
    generate: Generate, update: Callable[[OpenVLAInputs, torch.Tensor], Adapters], updates: int = UPDATES[EARLY]
) -> tuple[float, float]:
    """The slope of an engine's movement on the exact one, and its standard error over the updates: 1 is all of it.

    `update(inputs, tokens)` trains a learner from its base and brings the engine to it. The engine's log-probs, of what
    it sampled before and after, are compared with the exact ones of the base. The slope before is what bfloat16 has by
    itself along the direction of the movement: it is subtracted.
    """
    twin = adapter_rounding.adapted(MODEL, "float32", "cpu")
    inputs, tokens = adapter_rounding.decisions(twin, updates * ROWS)
    sampling = Sampling(adapter_rounding.TEMPERATURE)
    at_start = generate(inputs, sampling, list(range(len(inputs))))
    slopes, weights = [], []
    for start in range(0, len(inputs), ROWS):
        rows = slice(start, start + ROWS)
        own = inputs.rows(rows)
        adapters = update(own, tokens[rows])
        samples = [at_start.rows(rows), generate(own, sampling, list(range(start, start + ROWS)))]
        twin.reset_adapters(0)
        twin.weights_changed()
        base = [adapter_rounding.logprobs(twin, own, sampled.sample.ids) for sampled in samples]
        with torch.no_grad():
            for name, tensor in adapters.items():
                twin.get_parameter(name).copy_(tensor)
        twin.weights_changed()
        exact = [adapter_rounding.logprobs(twin, own, s.sample.ids) - b for s, b in zip(samples, base, strict=True)]
        before, after = (
            adapter_rounding.slope(s.engine_logprobs.double() - b, e)[0]
            for s, b, e in zip(samples, base, exact, strict=True)
        )
        slopes.append(after - before)
        weights.append(float(exact[1].square().sum()))
    total = sum(weights)
    mean = sum(w * s for w, s in zip(weights, slopes, strict=True)) / total
    spread = sum(w * w * (s - mean) ** 2 for w, s in zip(weights, slopes, strict=True))
    return mean, math.sqrt(spread) / total
