"""The golden comparisons as plain functions: the golden tests call them, and the mutation tests see them fail."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from fakes.golden_arrays import Arrays, assert_close, load_arrays, rounding
from fakes.golden_folder import golden_folder

from vlarl.envs.libero.env import LiberoEnv
from vlarl.policies import distribution
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.config import OpenVLAConfig, read_config
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.processor import Processor

OPENVLA = golden_folder("openvla-tiny")
OFT = golden_folder("openvla-oft-tiny")
RLDS = golden_folder("rlds")


@dataclass(frozen=True)
class Model:
    """A checkpoint as it is used, and in float64, which shows the error of float32."""

    policy: OpenVLAPolicy
    exact: OpenVLAPolicy

    def assert_equal(
        self, compute: Callable[[OpenVLAPolicy], torch.Tensor], theirs: np.ndarray, scale: np.ndarray | None = None
    ) -> float:
        """What the policy computes equals the original's up to rounding, whose bound is returned.

        `scale` holds the values that were rounded on the way, where the result is their small difference.
        """
        ours, exact = compute(self.policy), compute(self.exact)
        bound = rounding(ours, exact, theirs if scale is None else scale)
        assert_close(ours, theirs, bound)
        return bound


def load_openvla() -> Model:
    return Model(*(read_policy(OPENVLA, dtype=dtype) for dtype in (torch.float32, torch.float64)))


def load_oft(*, use_proprio: bool = True) -> Model:
    """With the regression head; the arrays tell what the folder does not."""
    expected = load_arrays(OFT / "expected.npz")
    read = partial(
        read_policy,
        OFT,
        decoder="parallel",
        chunk_length=expected["token_actions"].shape[1],
        num_images=expected["pixel_values"].shape[1] // (3 * len(read_config(OFT).towers)),
        use_proprio=None if use_proprio else False,
        unnorm_key=oft_key(),
        l1_head=use_proprio,
    )
    return Model(read(dtype=torch.float32), read(dtype=torch.float64))


def oft_key() -> str:
    """The statistics that the trainer wrote beside the checkpoint."""
    return next(iter(read_json(OFT / "dataset_statistics.json")))


def openvla_inputs(policy: OpenVLAPolicy, expected: Arrays) -> OpenVLAInputs:
    """Prompts of the file, pixels by our processor from its images."""
    pixels = np.stack([policy.processor._pixels(image[None]) for image in expected["images"]])
    ids = torch.from_numpy(expected["input_ids"])
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return OpenVLAInputs(ids, mask, torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous(), None)


def oft_inputs(expected: Arrays) -> OpenVLAInputs:
    """The golden pixels are normalised already, which the vision backbone takes as floats."""
    ids = torch.from_numpy(expected["input_ids"])
    pixels, proprio = (torch.from_numpy(expected[key]) for key in ("pixel_values", "proprio_normalized"))
    return OpenVLAInputs(ids, torch.ones(ids.shape, dtype=torch.bool), pixels, proprio)


def beside_a_longer_prompt(inputs: OpenVLAInputs, pad_token_id: int, extra: int = 4) -> OpenVLAInputs:
    """The same rows, right-padded because one more row has a prompt that is `extra` tokens longer."""
    repeated = torch.arange(extra) % (inputs.input_ids.shape[1] - 1) + 1
    longer = torch.cat([inputs.input_ids[:1], inputs.input_ids[:1, repeated]], dim=1)
    padded = torch.nn.functional.pad(inputs.input_ids, (0, extra), value=pad_token_id)
    mask = torch.nn.functional.pad(inputs.attention_mask, (0, extra), value=False)
    return OpenVLAInputs(
        torch.cat([padded, longer]),
        torch.cat([mask, torch.ones_like(longer, dtype=torch.bool)]),
        torch.cat([inputs.pixels, inputs.pixels[:1]]),
        None if inputs.proprio is None else torch.cat([inputs.proprio, inputs.proprio[:1]]),
    )


def greedy_bins(logits: torch.Tensor, theirs: np.ndarray, bound: float) -> torch.Tensor:
    """The original's greedy bins; ours must be the same, except where rounding decides between two."""
    best = theirs.max(-1)
    chosen = np.take_along_axis(theirs, distribution.greedy(logits).numpy()[..., None], -1)[..., 0]
    assert (best - chosen).max() <= 2 * bound, f"a greedy token is {(best - chosen).max()} below the original's"
    return torch.from_numpy(theirs.argmax(-1))


def check_pixels(model: Model, expected: Arrays) -> None:
    normalised = model.policy.model.vision_backbone.normalize(openvla_inputs(model.policy, expected).pixels)
    theirs = expected["pixel_values"]
    assert_close(normalised, theirs, 4 * float(np.finfo(np.float32).eps * np.abs(theirs).max()))


@torch.no_grad()
def check_vision(model: Model, expected: Arrays) -> None:
    pixels = openvla_inputs(model.policy, expected).pixels
    model.assert_equal(lambda policy: policy.model.vision_backbone(pixels), expected["vision_features"])
    model.assert_equal(
        lambda policy: policy.model.projector(policy.model.vision_backbone(pixels)), expected["projected"]
    )


def over_vocabulary(policy: OpenVLAPolicy, states: torch.Tensor) -> torch.Tensor:
    """Float32 logits over the padded vocabulary, of which the model itself reads the action ids alone."""
    logits: torch.Tensor = policy.model.language_model.lm_head(states)
    return logits.float()


def full_logits(policy: OpenVLAPolicy, inputs: OpenVLAInputs) -> torch.Tensor:
    """Over the whole vocabulary, where the critic reads, too."""
    return over_vocabulary(policy, policy.decoder.first_state(policy.model, policy._prefix(inputs)))


@torch.no_grad()
def check_last_logits(model: Model, expected: Arrays) -> None:
    inputs = openvla_inputs(model.policy, expected)
    model.assert_equal(lambda policy: full_logits(policy, inputs), expected["logits_last"])


def action_bins(policy: OpenVLAPolicy, expected: Arrays) -> torch.Tensor:
    return torch.from_numpy(expected["greedy_tokens"]) - policy.codec.first_id


@torch.no_grad()
def check_decoding(model: Model, expected: Arrays) -> None:
    """Token by token along the original's tokens, and all tokens given."""
    inputs, theirs = openvla_inputs(model.policy, expected), expected["action_logits"]
    bins = action_bins(model.policy, expected)

    def decoded(policy: OpenVLAPolicy) -> torch.Tensor:
        return policy.decode(inputs, lambda logits, first: bins[:, first : first + logits.shape[1]])[1]

    bound = model.assert_equal(decoded, theirs)
    assert torch.equal(greedy_bins(decoded(model.policy), theirs, bound), bins)
    model.assert_equal(lambda policy: policy.score(inputs, bins + policy.codec.first_id).logits, theirs)


@torch.no_grad()
def check_logprobs(model: Model, expected: Arrays) -> None:
    inputs, bins = openvla_inputs(model.policy, expected), action_bins(model.policy, expected)
    tokens = torch.from_numpy(expected["greedy_tokens"])

    def over_actions(policy: OpenVLAPolicy, temperature: float) -> torch.Tensor:
        return distribution.token_logprobs(policy.score(inputs, tokens).logits, bins, temperature)

    def over_all(policy: OpenVLAPolicy, temperature: float) -> torch.Tensor:
        states = policy.decoder.states(policy.model, policy._prefix(inputs), tokens)
        return distribution.token_logprobs(over_vocabulary(policy, states), tokens, temperature)

    for support, compute in (("action", over_actions), ("fullvocab", over_all)):
        for name, temperature in temperatures(expected, support):
            # A log-prob is a difference of logits, and as uncertain as they are.
            model.assert_equal(partial(compute, temperature=temperature), expected[name], expected["action_logits"])


def temperatures(expected: Arrays, support: str) -> list[tuple[str, float]]:
    """The names of the arrays of log-probs, and the temperature that each name ends in."""
    found = [(name, re.fullmatch(rf"logprob_{support}_T([\d.]+)", name)) for name in expected]
    return [(name, float(match[1])) for name, match in found if match]


@torch.no_grad()
def check_entropy_and_sampling(model: Model, expected: Arrays) -> None:
    """Against numpy in float64, from the golden logits."""
    policy, tokens = model.policy, torch.from_numpy(expected["greedy_tokens"])
    logits = policy.score(openvla_inputs(policy, expected), tokens).logits
    for _, temperature in temperatures(expected, "action"):
        scaled = expected["action_logits"].astype(np.float64) / temperature
        probs = np.exp(scaled - scaled.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        entropy = -(probs * np.log(probs)).sum(-1)
        assert_close(distribution.token_entropy(logits, temperature), entropy, 1e-3)
        # The middle of each of the most likely bins' parts of [0, 1], where no rounding moves a sample into the next.
        for chosen in np.argsort(probs, axis=-1)[..., -3:].transpose(2, 0, 1):
            below = np.take_along_axis(probs.cumsum(-1) - probs, chosen[..., None], -1)[..., 0]
            width = np.take_along_axis(probs, chosen[..., None], -1)[..., 0]
            certain = width > 1e-3
            sampled = distribution.sample(logits, temperature, torch.from_numpy(below + width / 2)).numpy()
            assert sampled[certain].tolist() == chosen[certain].tolist()


def check_actions(model: Model, expected: Arrays) -> None:
    policy = model.policy
    normalised = policy.codec.decode(expected["greedy_tokens"])[:, 0]
    for name in expected:
        if name.startswith("actions_"):
            _assert_units(policy, normalised, name.removeprefix("actions_"), expected[name])


def _assert_units(policy: OpenVLAPolicy, normalised: np.ndarray, key: str, actions: np.ndarray) -> None:
    low, high, _ = policy.normalizer._bounds("action", key)
    widest = max(1.0, float((high - low).max()))
    assert_close(policy.unnormalize(normalised, key), actions, float(np.finfo(np.float32).eps) * widest)
    # Centres are whole multiples of 1/(bins - 1). In float64 even the 1e-8 by which OFT widens the range is seen.
    steps = policy.codec.num_bins - 1
    exact = np.rint(normalised.astype(np.float64) * steps) / steps
    assert_close(policy.normalizer.unnormalize(exact, key), actions, 1e-12)


@torch.no_grad()
def check_ragged(model: Model, expected: Arrays) -> None:
    """Rows mean the same beside a longer prompt: decoded, scored, and where the critic reads."""
    policy = model.policy
    inputs = beside_a_longer_prompt(openvla_inputs(policy, expected), policy.config.pad_token_id)
    rows, first_id = len(inputs) - 1, policy.codec.first_id
    bins = torch.cat([action_bins(policy, expected), action_bins(policy, expected)[:1]])
    model.assert_equal(
        lambda policy: policy.decode(inputs, lambda lg, first: bins[:, first : first + lg.shape[1]])[1][:rows],
        expected["action_logits"],
    )
    model.assert_equal(lambda policy: policy.score(inputs, bins + first_id).logits[:rows], expected["action_logits"])
    model.assert_equal(lambda policy: full_logits(policy, inputs)[:rows], expected["logits_last"])


def oft_logits(policy: OpenVLAPolicy, inputs: OpenVLAInputs) -> torch.Tensor:
    return policy.decode(inputs, lambda logits, _: distribution.greedy(logits))[1]


def oft_states(policy: OpenVLAPolicy, inputs: OpenVLAInputs) -> torch.Tensor:
    """[B, K*D, H], which the parallel decoder has whatever the tokens are."""
    unread = torch.zeros(len(inputs), policy.config.num_action_tokens, dtype=torch.int64)
    return policy.decoder.states(policy.model, policy._prefix(inputs), unread)


@torch.no_grad()
def check_oft_tokens(model: Model, expected: Arrays) -> None:
    """States, logits and actions, with the proprio token or without, as the policy was loaded."""
    policy = model.policy
    inputs, prefix = oft_inputs(expected), "token" if policy.config.use_proprio else "token_noproprio"
    hidden, theirs = expected[f"{prefix}_hidden"], expected[f"{prefix}_action_logits"]
    model.assert_equal(lambda policy: oft_states(policy, inputs), hidden)
    model.assert_equal(lambda policy: policy.decoder.first_state(policy.model, policy._prefix(inputs)), hidden[:, 0])
    bound = model.assert_equal(lambda policy: oft_logits(policy, inputs), theirs)
    ids, logits = policy.decode(inputs, lambda logits, _: distribution.greedy(logits))
    assert torch.equal(policy.score(inputs, ids).logits, logits)
    bins = greedy_bins(logits, theirs, bound)
    normalised = policy.codec.decode((bins + policy.codec.first_id).numpy())
    _assert_units(policy, normalised, oft_key(), expected[f"{prefix}_actions"])


@torch.no_grad()
def check_oft_regression(model: Model, expected: Arrays) -> None:
    inputs = oft_inputs(expected)
    model.assert_equal(lambda policy: oft_states(policy, inputs), expected["l1_hidden"])

    def actions(policy: OpenVLAPolicy) -> torch.Tensor:
        return torch.from_numpy(policy.unnormalize(policy.regress(inputs).numpy()))

    model.assert_equal(actions, expected["l1_actions"])


@torch.no_grad()
def check_oft_ragged(model: Model, expected: Arrays) -> None:
    inputs = beside_a_longer_prompt(oft_inputs(expected), model.policy.config.pad_token_id)
    model.assert_equal(lambda policy: oft_logits(policy, inputs)[:-1], expected["token_action_logits"])


OPENVLA_CHECKS: tuple[Callable[[Model, Arrays], None], ...] = (
    check_pixels,
    check_vision,
    check_last_logits,
    check_decoding,
    check_logprobs,
    check_entropy_and_sampling,
    check_actions,
    check_ragged,
)
OFT_CHECKS: tuple[Callable[[Model, Arrays], None], ...] = (
    check_oft_tokens,
    check_oft_regression,
    check_oft_ragged,
)


# LIBERO's frames, from the renderer to the pixels that the towers read.


class RenderedEnv(LiberoEnv):
    """LIBERO's environment whose simulator shows the given frames, one at each look."""

    def __init__(self, frames: np.ndarray) -> None:
        shown = iter(frames)
        self._renderer = SimpleNamespace(render=lambda model, state, camera, size: next(shown))  # type: ignore[assignment]
        self._physics = SimpleNamespace(  # type: ignore[assignment]
            model=None, seen=lambda: None, proprio=lambda: (np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(2))
        )
        self._instruction, self._cameras, self._image_size = "", ("agentview",), frames.shape[1]


def libero_arrays() -> dict[str, np.ndarray]:
    return load_arrays(RLDS / "libero_preprocess.npz")


def libero_processor(images: ImagePipeline, size: int) -> Processor:
    config: OpenVLAConfig = read_config(OPENVLA)
    towers = tuple(replace(tower, image_size=size) for tower in config.towers)
    return Processor(replace(config, towers=towers), None, Normalizer(config), images)


def check_resized(expected: Arrays) -> None:
    """The README of the golden data requires 2 grey levels on 85% of the pixels and 20 at most; ours come closer."""
    _assert_rendered(expected, "resized", ImagePipeline(jpeg=True, resize="lanczos3"))


def check_cropped(expected: Arrays) -> None:
    """From the resized frames, which hold the same pixels on both sides."""
    resized, theirs = expected["resized"], expected["center_cropped"]
    processor = libero_processor(ImagePipeline(center_crop=True), resized.shape[1])
    assert_nearly_equal(np.concatenate([processor._pixels(frame[None]) for frame in resized]), theirs)


def check_whole_pipeline(expected: Arrays) -> None:
    _assert_rendered(expected, "center_cropped", ImagePipeline(jpeg=True, resize="lanczos3", center_crop=True))


LIBERO_CHECKS: tuple[Callable[[Arrays], None], ...] = (check_resized, check_cropped, check_whole_pipeline)


def _assert_rendered(expected: Arrays, name: str, images: ImagePipeline) -> None:
    env = RenderedEnv(expected["agentview"])
    processor = libero_processor(images, expected[name].shape[1])
    ours = np.concatenate([processor._pixels(env.observe().images) for _ in expected["agentview"]])
    assert_nearly_equal(ours, expected[name])


def assert_nearly_equal(ours: np.ndarray, theirs: np.ndarray, fraction: float = 0.999) -> None:
    """Equal to the grey level, save a few pixels that rounding tips to the next one."""
    assert ours.dtype == theirs.dtype == np.uint8
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(np.int16) - theirs)
    assert difference.max() <= 1, f"largest difference {difference.max()}"
    assert (difference == 0).mean() >= fraction, f"{(difference == 0).mean():.4%} of the values are equal"
