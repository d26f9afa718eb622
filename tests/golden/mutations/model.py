"""What the model computes: towers, the layout of a row, masks and positions, OFT's parts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comparisons as golden
import torch

from mutations import Mutation, instead, method_result, oft, openvla, result
from vlarl.policies.openvla import checkpoint as checkpoint_module
from vlarl.policies.openvla import decoders
from vlarl.policies.openvla import policy as policy_module
from vlarl.policies.openvla.decoders import ParallelDecoder, Prefix
from vlarl.policies.openvla.heads import L1ActionHead
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.processor import Processor
from vlarl.policies.openvla.vision import LayerScale, VisionBackbone, VisionTower

DINO = ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


# --- pixels and towers ---


def the_other_towers_constants(self: VisionTower, pixels: torch.Tensor) -> torch.Tensor:
    wrong = SIGLIP if "dinov2" in self.config.timm_id else DINO
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in wrong)
    return (pixels.float() / 255.0 - mean) / std


def with_blocks(choose: Callable[[torch.nn.ModuleList], list[torch.nn.Module]]) -> Callable[[Any], Any]:
    """A tower whose forward, which leaves the last block out, finds others."""

    def make(original: Any) -> Any:
        def forward(self: VisionTower, *args: Any) -> torch.Tensor:
            blocks = self.blocks
            self.blocks = torch.nn.ModuleList(choose(blocks))
            try:
                return original(self, *args)
            finally:
                self.blocks = blocks

        return forward

    return make


def halves_swapped(features: torch.Tensor, dim: int, first: int) -> torch.Tensor:
    return torch.cat([features.narrow(dim, first, features.shape[dim] - first), features.narrow(dim, 0, first)], dim)


def siglip_first(self: VisionBackbone, features: torch.Tensor) -> torch.Tensor:
    return halves_swapped(features, 2, self.featurizer.config.embed_dim)


def images_swapped(self: VisionBackbone, features: torch.Tensor) -> torch.Tensor:
    return halves_swapped(features, 1, features.shape[1] // 2)


VISION = [
    Mutation(
        "colours in the order RGB",
        openvla(golden.check_pixels),
        Processor,
        "_pixels",
        result(lambda pixels: pixels[..., ::-1].copy()),
    ),
    Mutation(
        "each tower's own mean and std",
        openvla(golden.check_pixels),
        VisionTower,
        "normalize",
        instead(the_other_towers_constants),
    ),
    Mutation(
        "DINOv2's channels first",
        openvla(golden.check_pixels),
        VisionBackbone,
        "towers",
        lambda original: property(lambda self: original.fget(self)[::-1]),
    ),
    Mutation(
        "DINOv2's features first", openvla(golden.check_vision), VisionBackbone, "forward", method_result(siglip_first)
    ),
    Mutation(
        "second-to-last block, not the last",
        openvla(golden.check_vision),
        VisionTower,
        "forward",
        with_blocks(lambda blocks: [*blocks, blocks[-1]]),
    ),
    Mutation(
        "second-to-last block, not before",
        openvla(golden.check_vision),
        VisionTower,
        "forward",
        with_blocks(lambda blocks: [*blocks[:-1]]),
    ),
    Mutation(
        "no final norm on the features",
        openvla(golden.check_vision),
        VisionTower,
        "forward",
        method_result(lambda tower, features: tower.norm(features)),
    ),
    Mutation(
        "LayerScale",
        openvla(golden.check_vision),
        LayerScale,
        "forward",
        instead(lambda self, x, residual: residual + x),
    ),
    Mutation(
        "the agent's view before the wrist's",
        oft(golden.check_oft_tokens),
        VisionBackbone,
        "forward",
        method_result(images_swapped),
    ),
]


# --- layout of a row, masks, positions ---


def columns(order: Callable[[int, int], list[int]]) -> Callable[[Any], Any]:
    """The prefix with its columns in another order, or some left out, by the indices (head, columns)."""

    def change(prefix: Prefix) -> Prefix:
        chosen = order(prefix.head, prefix.embeds.shape[1])
        return Prefix(prefix.embeds[:, chosen], prefix.padding, prefix.head)

    return result(change)


def run_with(**forced: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: original(*args, **{**kwargs, **forced})


def without_last_column(original: Any) -> Any:
    return lambda model, embeds, positions, **kwargs: original(model, embeds[:, :-1], positions[:, :-1], **kwargs)


def padding_taken_for_tokens(original: Any) -> Any:
    def embed(model: OpenVLAModel, inputs: OpenVLAInputs, *args: Any) -> Prefix:
        return original(model, replace(inputs, attention_mask=torch.ones_like(inputs.attention_mask)), *args)

    return embed


def all_columns_count(self: Prefix, start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop).unsqueeze(0)


def read_shifted(by: int) -> Callable[[Any], Any]:
    return result(lambda read: slice(read.start + by, read.stop + by))


def placeholders_embedded(original: Any) -> Any:
    def part(self: ParallelDecoder, model: OpenVLAModel, like: torch.Tensor) -> list[torch.Tensor]:
        slots, *stop = original(self, model, like)
        ids = torch.full(slots.shape[:2], model.config.first_action_id)
        return [model.embed_tokens(ids), *stop]

    return part


LAYOUT = [
    Mutation(
        "BOS before the patches",
        openvla(golden.check_last_logits),
        policy_module,
        "embed_prefix",
        columns(lambda head, size: [*range(1, head), 0, *range(head, size)]),
    ),
    Mutation(
        "patches right after BOS, not after the prompt",
        openvla(golden.check_last_logits),
        policy_module,
        "embed_prefix",
        columns(lambda head, size: [0, *range(head, size), *range(1, head)]),
    ),
    Mutation(
        "causal attention between the tokens",
        openvla(golden.check_decoding),
        decoders,
        "run_layers",
        run_with(causal=False),
    ),
    Mutation(
        "read at the last token of the prompt",
        openvla(golden.check_last_logits),
        Prefix,
        "read",
        read_shifted(-1),
    ),
    *(
        Mutation(f"{name}: {breaks}", check, owner, attribute, make)
        for name, check in (("OpenVLA", openvla(golden.check_ragged)), ("OFT", oft(golden.check_oft_ragged)))
        for breaks, owner, attribute, make in (
            ("positions skip padding", Prefix, "positions", instead(all_columns_count)),
            ("padding is not seen", Prefix, "key_mask", instead(lambda self, tail: None)),
            ("padding does not stand last", policy_module, "embed_prefix", padding_taken_for_tokens),
        )
    ),
    Mutation(
        "the proprio token after the patches",
        oft(golden.check_oft_tokens),
        policy_module,
        "embed_prefix",
        columns(lambda head, size: [0, head - 1, *range(1, head - 1), *range(head, size)]),
    ),
    Mutation(
        "the proprio token is there",
        oft(golden.check_oft_tokens),
        policy_module,
        "embed_prefix",
        columns(lambda head, size: [*range(head - 1), *range(head, size)]),
    ),
    Mutation(
        "OFT: every token sees every token",
        oft(golden.check_oft_tokens),
        decoders,
        "run_layers",
        run_with(causal=True),
    ),
    Mutation(
        "OFT: embeddings of the action slots are zero",
        oft(golden.check_oft_tokens),
        ParallelDecoder,
        "action_part",
        placeholders_embedded,
    ),
    Mutation(
        "OFT: the stop id closes the sequence",
        oft(golden.check_oft_tokens),
        decoders,
        "run_layers",
        without_last_column,
    ),
    Mutation("OFT: read one before each slot", oft(golden.check_oft_tokens), Prefix, "read", read_shifted(1)),
    Mutation("OFT: read from the last token on", oft(golden.check_oft_tokens), Prefix, "read", read_shifted(-1)),
    Mutation(
        "the critic reads the state before the first token",
        oft(golden.check_oft_tokens),
        ParallelDecoder,
        "first_state",
        instead(lambda self, model, prefix: self._run(model, prefix, 2)[:, 1]),
    ),
]


# --- OFT's component files ---


def dimension_by_dimension(original: Any) -> Any:
    """States taken as [D, K] instead of [K, D]."""

    def forward(self: L1ActionHead, states: torch.Tensor) -> torch.Tensor:
        b, t, h = states.shape
        steps = t // self.action_dim
        return original(self, states.view(b, self.action_dim, steps, h).transpose(1, 2).reshape(b, t, h))

    return forward


def prefixed(state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    return None if state is None else {f"module.{name}": tensor for name, tensor in state.items()}


COMPONENTS = [
    Mutation(
        "names in component files begin with module.",
        oft(golden.check_oft_tokens),
        checkpoint_module,
        "read_component",
        result(prefixed),
        error=ValueError,
    ),
    Mutation(
        "the regression head reads step by step",
        oft(golden.check_oft_regression),
        L1ActionHead,
        "forward",
        dimension_by_dimension,
    ),
]
