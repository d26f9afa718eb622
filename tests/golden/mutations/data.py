"""What goes into the model and comes out: action tokens, statistics, prompts, frames."""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import comparisons as golden
import conventions
import numpy as np
import torch
from PIL import Image

from mutations import Mutation, instead, libero, method_result, oft, openvla, result, with_attribute
from vlarl.envs.libero import env as libero_env
from vlarl.images import crop, lanczos
from vlarl.policies import distribution
from vlarl.policies.openvla import config, processor
from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.processor import Processor

# --- action tokens and statistics ---


def mirrored_decode(original: Any) -> Any:
    return lambda self, ids: original(self, self.first_id + self.vocab_size - 1 - np.asarray(ids))


def mirrored_encode(original: Any) -> Any:
    return lambda self, actions: original(self, -np.asarray(actions))


def full_vocabulary(self: OpenVLAModel, states: torch.Tensor) -> torch.Tensor:
    """The action ids come first, so that action-bin indices still fit; all other ids follow."""
    return self.language_model.lm_head(states).float().roll(-self.config.first_action_id, dims=-1)


def at_temperature_one(original: Any) -> Any:
    return lambda logits, *args: original(logits, *(1.0 if isinstance(a, float) else a for a in args))


def by_extremes(self: Normalizer, what: str, unnorm_key: str | None) -> tuple[np.ndarray, ...]:
    stats = self._stats[self.resolve(unnorm_key)][what]
    return np.asarray(stats["min"]), np.asarray(stats["max"]), np.asarray(stats["mask"])


def unclipped(self: Normalizer, values: np.ndarray, what: str, unnorm_key: str | None) -> np.ndarray:
    low, high, _ = self._bounds(what, unnorm_key)
    return (2.0 * (values - low) / (high - low + 1e-8) - 1.0).astype(np.float32)


TOKENS_AND_STATISTICS = [
    Mutation(
        "255 centres, not as many as edges",
        openvla(golden.check_actions),
        UniformActionCodec,
        "__init__",
        with_attribute("centers", lambda codec: np.linspace(-1, 1, codec.num_bins)),
    ),
    Mutation(
        "256 edges, not as many bins",
        conventions.check_known_tokens,
        UniformActionCodec,
        "__init__",
        with_attribute("edges", lambda codec: np.linspace(-1, 1, codec.num_bins + 1)),
    ),
    Mutation(
        "a higher id is a smaller action", openvla(golden.check_actions), UniformActionCodec, "decode", mirrored_decode
    ),
    Mutation(
        "a smaller action is a higher id", conventions.check_known_tokens, UniformActionCodec, "encode", mirrored_encode
    ),
    Mutation(
        "action ids end before the padding of the head",
        openvla(golden.check_decoding),
        config,
        "action_end",
        instead(lambda raw, kind, padded_vocab_size, padding: padded_vocab_size),
    ),
    Mutation(
        "probabilities over the action ids alone",
        openvla(golden.check_logprobs),
        OpenVLAModel,
        "action_logits",
        instead(full_vocabulary),
    ),
    *(
        Mutation(f"temperature in {name}", openvla(check), distribution, name, at_temperature_one)
        for name, check in (
            ("token_logprobs", golden.check_logprobs),
            ("token_entropy", golden.check_entropy_and_sampling),
            ("sample", golden.check_entropy_and_sampling),
        )
    ),
    Mutation(
        "the gripper is left as it is",
        openvla(golden.check_actions),
        Normalizer,
        "_bounds",
        result(lambda bounds: (*bounds[:2], np.ones_like(bounds[2]))),
    ),
    Mutation("actions by quantiles", openvla(golden.check_actions), Normalizer, "_bounds", instead(by_extremes)),
    Mutation("proprio by quantiles", conventions.check_proprio, Normalizer, "_bounds", instead(by_extremes)),
    Mutation("proprio is clipped", conventions.check_proprio, Normalizer, "_into_unit", instead(unclipped)),
    Mutation(
        "OFT widens the range by 1e-8",
        oft(golden.check_oft_tokens),
        Normalizer,
        "__init__",
        with_attribute("_range_eps", lambda _: 0.0),
    ),
    Mutation(
        "OpenVLA does not widen the range",
        openvla(golden.check_actions),
        Normalizer,
        "__init__",
        with_attribute("_range_eps", lambda _: 1e-8),
    ),
    Mutation(
        "statistics of the suite, not the first there are",
        conventions.check_statistics_of_a_suite,
        Normalizer,
        "resolve",
        instead(lambda self, key=None: min(self._stats)),
    ),
]


# --- prompt ---


def prompt_ids(*, lower: bool = True, bos: bool = True, suffix: bool = True) -> Callable[[Any], Any]:
    def wrong(self: Processor, instruction: str) -> tuple[int, ...]:
        text = self.config.prompt_template.format(instruction=instruction.lower() if lower else instruction)
        first, last = [self.config.bos_id] * bos, [self.config.prompt_suffix_id] * suffix
        return (*first, *self.tokenizer.encode(text).ids, *last)  # type: ignore[union-attr, arg-type, return-value]

    return instead(wrong)


def short_mask(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = batch
    last = mask.sum(dim=1, keepdim=True) - 1
    return ids, mask.scatter(1, last, False)


def suffix_after_padding(
    self: Processor, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = batch
    last, end = mask.sum(dim=1, keepdim=True) - 1, torch.tensor([ids.shape[1] - 1])
    ids = ids.scatter(1, last, self.config.pad_token_id).index_fill(1, end, self.config.prompt_suffix_id or 0)
    return ids, mask.scatter(1, last, False).index_fill(1, end, True)


PROMPT = [
    Mutation(f"prompt: {breaks}", conventions.check_prompt, owner, name, make)
    for breaks, owner, name, make in (
        ("a line break before Out", config, "prompt_template", result(lambda text: text.replace("\n", " "))),
        ("lower case", Processor, "_prompt_ids", prompt_ids(lower=False)),
        ("BOS first", Processor, "_prompt_ids", prompt_ids(bos=False)),
        ("the empty token last", Processor, "_prompt_ids", prompt_ids(suffix=False)),
        ("the mask includes the empty token", Processor, "prompts", result(short_mask)),
        ("the empty token stands before the padding", Processor, "prompts", method_result(suffix_after_padding)),
    )
]


# --- LIBERO's frames ---


def plain_jpeg(image: np.ndarray, quality: int = 95, subsampling: str = "4:2:0") -> np.ndarray:
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality, subsampling=subsampling)
    return np.asarray(Image.open(file))


def pil_resize(resample: Image.Resampling) -> Callable[[Any], Any]:
    return instead(lambda image, size: np.asarray(Image.fromarray(image).resize((size, size), resample)))


def without_antialias(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    centers, lines = (np.arange(target) + 0.5) * source / target, np.arange(source)[:, None]
    distance = lines + 0.5 - centers
    kernel = np.sinc(distance) * np.sinc(distance / 3) * (np.abs(distance) < 3)
    return np.broadcast_to(lines, kernel.shape), (kernel / kernel.sum(axis=0)).astype(np.float32)


FRAMES = [
    Mutation(f"LIBERO: {breaks}", libero(check), owner, name, make)
    for breaks, check, owner, name, make in (
        ("turned by 180 degrees", golden.check_resized, libero_env, "upright", instead(lambda pixels: pixels)),
        ("turned, not flipped", golden.check_resized, libero_env, "upright", instead(lambda pixels: pixels[::-1])),
        ("JPEG", golden.check_resized, processor, "jpeg_round_trip", instead(lambda image: image)),
        (
            "JPEG of quality 95",
            golden.check_resized,
            processor,
            "jpeg_round_trip",
            instead(partial(plain_jpeg, quality=75)),
        ),
        (
            "JPEG with halved chroma",
            golden.check_resized,
            processor,
            "jpeg_round_trip",
            instead(partial(plain_jpeg, subsampling="4:4:4")),
        ),
        ("TensorFlow's fast decoder", golden.check_resized, processor, "jpeg_round_trip", instead(plain_jpeg)),
        ("Lanczos", golden.check_resized, processor, "lanczos_resize", pil_resize(Image.Resampling.BICUBIC)),
        ("rounding once", golden.check_resized, processor, "lanczos_resize", pil_resize(Image.Resampling.LANCZOS)),
        ("antialias", golden.check_resized, lanczos, "_lanczos_taps", instead(without_antialias)),
        (
            "rounding, not cutting off",
            golden.check_resized,
            lanczos,
            "_to_uint8",
            instead(lambda values: np.clip(values, 0, 255).astype(np.uint8)),
        ),
        ("the crop", golden.check_cropped, processor, "center_crop", instead(lambda image: image)),
        (
            "a crop of 0.9 of the area, not of the side",
            golden.check_cropped,
            processor,
            "center_crop",
            instead(partial(crop.center_crop, area=0.81)),
        ),
        ("bytes by 255.5", golden.check_cropped, crop, "FLOAT_TO_BYTE", instead(np.float32(255.0))),
    )
]
