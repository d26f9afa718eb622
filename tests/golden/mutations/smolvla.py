"""What SmolVLA computes: pixels, tokens, the prefix, which token sees which, the chain."""

from collections.abc import Callable
from typing import Any

import smolvla_comparisons as golden
import torch
import torch.nn.functional as F

from mutations import Mutation, instead, result
from vlarl.policies import flow
from vlarl.policies.smolvla import layers, model, vision
from vlarl.policies.smolvla.layers import CrossLayer, KeyValue
from vlarl.policies.smolvla.processor import Processor
from vlarl.policies.smolvla.statistics import Scaling


def of(check: Callable[[golden.Golden], None]) -> Callable[[], None]:
    return lambda: check(golden.load())


def padded_elsewhere(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """With the black at the bottom and the right."""
    images = vision_pixels(pixels, size)
    empty = int((images[0, 0, :, -1] == -1).sum()), int((images[0, 0, -1] == -1).sum())
    return images.roll((-empty[0], -empty[1]), (2, 3))


vision_pixels = vision.padded_pixels


def with_mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """The expert's layers with another mask."""

    def make(original: Any) -> Any:
        def run(self: Any, stack: Any, x: torch.Tensor, positions: Any, mask: torch.Tensor, before: Any) -> Any:
            changed = change(mask) if stack is self.expert.layers else mask
            return original(self, stack, x, positions, changed, before)

        return run

    return make


def every_action_seen(mask: torch.Tensor) -> torch.Tensor:
    count = mask.shape[1]
    return torch.cat([mask[:, :, :-count], torch.ones_like(mask[:, :, -count:])], dim=2)


def padding_is_seen(original: Any) -> Any:
    """By images and instruction."""

    def run(self: Any, stack: Any, x: torch.Tensor, positions: Any, mask: torch.Tensor, before: Any) -> Any:
        whole = torch.ones_like(mask) if before is None else mask
        return original(self, stack, x, positions, whole, before)

    return run


def joint_everywhere(original: Any) -> Any:
    """Positions of the cross-attending layers go on after the prefix."""

    def forward(self: CrossLayer, x: torch.Tensor, positions: Any, mask: torch.Tensor, before: KeyValue) -> Any:
        first = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)  # so that nothing is subtracted
        padded = F.pad(x, (0, 0, 1, 0))
        states, seen = original(self, padded, first, F.pad(mask, (0, 0, 1, 0), value=True), before)
        return states[:, 1:], seen

    return forward


SMOLVLA = [
    Mutation(
        "SmolVLA: black at the top and left",
        of(golden.check_velocities),
        model,
        "padded_pixels",
        instead(padded_elsewhere),
    ),
    Mutation(
        "SmolVLA: pixels in -1..1", of(golden.check_velocities), model, "padded_pixels", result(lambda x: (x + 1) / 2)
    ),
    Mutation(
        "SmolVLA: a newline ends the instruction",
        of(golden.check_inputs),
        Processor,
        "_tokens_of",
        lambda original: lambda self, text: original(self, text)[:-1],
    ),
    Mutation("SmolVLA: RoPE's base is 10,000", of(golden.check_velocities), layers, "ROPE_BASE", instead(100_000.0)),
    Mutation(
        "SmolVLA: embeddings times the square root of their width",
        of(golden.check_prefix),
        model.SmolVLAModel,
        "embed_context",
        lambda original: lambda self, *given: original(self, *given) / self.config.text.hidden**0.5,
    ),
    Mutation(
        "SmolVLA: an action sees those before it alone",
        of(golden.check_velocities),
        model.SmolVLAModel,
        "_run",
        with_mask(every_action_seen),
    ),
    Mutation("SmolVLA: padding is not seen", of(golden.check_velocities), model.SmolVLAModel, "_run", padding_is_seen),
    Mutation(
        "SmolVLA: positions restart where the expert only reads the prefix",
        of(golden.check_velocities),
        CrossLayer,
        "forward",
        joint_everywhere,
    ),
    Mutation(
        "SmolVLA: every second layer attends jointly",
        of(golden.check_velocities),
        layers.DecoderLayer,
        "forward",
        lambda original: (
            lambda self, x, positions, mask, before: (
                original(self, x, positions, mask, before)
                if not isinstance(self, layers.ExpertLayer)
                else original(self, x, positions, mask[:, :, -x.shape[1] :], None)
            )
        ),
    ),
    Mutation(
        "SmolVLA: the time grid begins at 1",
        of(golden.check_actions),
        flow,
        "_grid",
        result(lambda grid: grid - grid[-1]),
    ),
    Mutation(
        "SmolVLA: times are embedded with the shortest period first",
        of(golden.check_velocities),
        model,
        "time_embedding",
        result(lambda embedded: embedded.flip(1)),
    ),
    Mutation(
        "SmolVLA: actions are scaled back by mean and std",
        of(golden.check_actions),
        Scaling,
        "unnormalize",
        instead(lambda self, values: values),
    ),
    Mutation(
        "SmolVLA: squares of patches are merged by rows first",
        of(golden.check_prefix),
        vision.Connector,
        "forward",
        lambda original: lambda self, features: original(self, features.roll(1, 1)),
    ),
    Mutation(
        "SmolVLA: patches of float32 have the library's shifted positions",
        of(golden.check_prefix),
        vision.Embeddings,
        "_positions",
        instead(lambda self: self.position_embedding.weight),
    ),
]
