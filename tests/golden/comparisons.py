"""The golden comparisons as plain functions: the golden tests call them, and the mutation tests see them fail."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from vlarl.policies import distribution
from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.config import OpenVLAConfig, read_config
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.processor import Processor
from vlarl.types import Observation, PolicyInput

HERE = Path(__file__).parent
OPENVLA = HERE / "openvla-tiny"
OFT = HERE / "openvla-oft-tiny"

LOGIT_TOLERANCE = 2e-4
FEATURE_TOLERANCE = 5e-5
TEMPERATURES = (1.0, 1.6)
LIBERO_SIZE = 224


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of an .npz file; remembers which of them were read."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self._arrays = dict(file)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def load_openvla() -> OpenVLAPolicy:
    return read_policy(OPENVLA, unnorm_key="libero_spatial")


def load_oft() -> OpenVLAPolicy:
    return read_policy(OFT, decoder="parallel", num_images=2, l1_head=True)


def load_oft_without_proprio() -> OpenVLAPolicy:
    return read_policy(OFT, decoder="parallel", num_images=2, use_proprio=False)


def assert_close(ours: torch.Tensor | np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else ours
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(np.float64) - theirs).max()
    assert difference <= tolerance, f"largest difference {difference}"


def openvla_inputs(policy: OpenVLAPolicy, expected: Arrays) -> PolicyInput:
    """Prompts of the file, pixels by our processor from its images."""
    pixels = np.stack([policy.processor._pixels(image[None]) for image in expected["images"]])
    ids = torch.from_numpy(expected["input_ids"])
    mask = torch.ones(ids.shape, dtype=torch.bool)
    return PolicyInput(ids, mask, torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).contiguous(), None)


def oft_inputs(expected: Arrays) -> PolicyInput:
    """The golden pixels are normalised already, which the vision backbone takes as floats."""
    ids = torch.from_numpy(expected["input_ids"])
    pixels, proprio = (torch.from_numpy(expected[key]) for key in ("pixel_values", "proprio_normalized"))
    return PolicyInput(ids, torch.ones(ids.shape, dtype=torch.bool), pixels, proprio)


def beside_a_longer_prompt(inputs: PolicyInput, pad_token_id: int) -> PolicyInput:
    """The same rows, right-padded because one more row has a prompt four tokens longer."""
    longer = torch.cat([inputs.input_ids[:1], inputs.input_ids[:1, 1:5]], dim=1)
    padded = torch.nn.functional.pad(inputs.input_ids, (0, 4), value=pad_token_id)
    mask = torch.nn.functional.pad(inputs.attention_mask, (0, 4), value=False)
    return PolicyInput(
        torch.cat([padded, longer]),
        torch.cat([mask, torch.ones_like(longer, dtype=torch.bool)]),
        torch.cat([inputs.pixels, inputs.pixels[:1]]),
        None if inputs.proprio is None else torch.cat([inputs.proprio, inputs.proprio[:1]]),
    )


def check_pixels(policy: OpenVLAPolicy, expected: Arrays) -> None:
    normalised = policy.model.vision_backbone.normalize(openvla_inputs(policy, expected).pixels)
    assert_close(normalised, expected["pixel_values"], 1e-6)


@torch.no_grad()
def check_vision(policy: OpenVLAPolicy, expected: Arrays) -> None:
    features = policy.model.vision_backbone(openvla_inputs(policy, expected).pixels)
    assert_close(features, expected["vision_features"], FEATURE_TOLERANCE)
    assert_close(policy.model.projector(features), expected["projected"], FEATURE_TOLERANCE)


@torch.no_grad()
def check_last_logits(policy: OpenVLAPolicy, expected: Arrays) -> None:
    state = policy.decoder.first_state(policy.model, policy._prefix(openvla_inputs(policy, expected)))
    assert_close(policy.model.full_logits(state), expected["logits_last"], LOGIT_TOLERANCE)


@torch.no_grad()
def check_decoding(policy: OpenVLAPolicy, expected: Arrays) -> None:
    """Token by token, and all tokens given."""
    inputs = openvla_inputs(policy, expected)
    ids, logits = policy.decode(inputs, lambda lg, _: distribution.greedy(lg))
    assert ids.tolist() == expected["greedy_tokens"].tolist()
    assert_close(logits, expected["action_logits"], LOGIT_TOLERANCE)
    scores = policy.score(inputs, torch.from_numpy(expected["greedy_tokens"]))
    assert_close(scores.logits, expected["action_logits"], LOGIT_TOLERANCE)


@torch.no_grad()
def check_logprobs(policy: OpenVLAPolicy, expected: Arrays) -> None:
    inputs, tokens = openvla_inputs(policy, expected), torch.from_numpy(expected["greedy_tokens"])
    logits = policy.score(inputs, tokens).logits
    states = policy.decoder.states(policy.model, policy._prefix(inputs), tokens)
    for temperature in TEMPERATURES:
        over_actions = distribution.token_logprobs(logits, tokens - policy.codec.first_id, temperature)
        assert_close(over_actions, expected[f"logprob_action_T{temperature}"], LOGIT_TOLERANCE)
        over_all = distribution.token_logprobs(policy.model.full_logits(states), tokens, temperature)
        assert_close(over_all, expected[f"logprob_fullvocab_T{temperature}"], LOGIT_TOLERANCE)


@torch.no_grad()
def check_entropy_and_sampling(policy: OpenVLAPolicy, expected: Arrays) -> None:
    """Against numpy in float64, from the golden logits."""
    tokens = torch.from_numpy(expected["greedy_tokens"])
    logits = policy.score(openvla_inputs(policy, expected), tokens).logits
    uniforms = np.random.default_rng(0).uniform(size=tokens.shape)
    for temperature in TEMPERATURES:
        scaled = expected["action_logits"].astype(np.float64) / temperature
        probs = np.exp(scaled - scaled.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        entropy = -(probs * np.log(probs)).sum(-1)
        assert_close(distribution.token_entropy(logits, temperature), entropy, 1e-3)
        places = (probs.cumsum(-1) < uniforms[..., None]).sum(-1)
        assert distribution.sample(logits, temperature, torch.from_numpy(uniforms)).tolist() == places.tolist()


def check_actions(policy: OpenVLAPolicy, expected: Arrays) -> None:
    normalised = policy.codec.decode(expected["greedy_tokens"])[:, 0]
    for key in ("libero_spatial", "bridge_orig"):
        _assert_units(policy, normalised, key, expected[f"actions_{key}"])


def _assert_units(policy: OpenVLAPolicy, normalised: np.ndarray, key: str | None, actions: np.ndarray) -> None:
    assert_close(policy.unnormalize(normalised, key), actions, 1e-7)
    # Centres are whole multiples of 1/255. In float64 even the 1e-8 by which OFT widens the range is seen.
    exact = np.rint(normalised.astype(np.float64) * 255) / 255
    assert_close(policy.normalizer.unnormalize(exact, key), actions, 1e-12)


@torch.no_grad()
def check_ragged(policy: OpenVLAPolicy, expected: Arrays) -> None:
    """Rows mean the same beside a longer prompt: decoded, scored, and where the critic reads."""
    inputs = beside_a_longer_prompt(openvla_inputs(policy, expected), policy.config.pad_token_id)
    rows = len(inputs) - 1
    ids, logits = policy.decode(inputs, lambda lg, _: distribution.greedy(lg))
    assert_close(logits[:rows], expected["action_logits"], LOGIT_TOLERANCE)
    assert_close(policy.score(inputs, ids).logits[:rows], expected["action_logits"], LOGIT_TOLERANCE)
    state = policy.decoder.first_state(policy.model, policy._prefix(inputs))
    assert_close(policy.model.full_logits(state)[:rows], expected["logits_last"], LOGIT_TOLERANCE)


@torch.no_grad()
def check_oft_tokens(policy: OpenVLAPolicy, expected: Arrays) -> None:
    """States, logits and actions, with the proprio token or without, as the policy was loaded."""
    inputs, prefix = oft_inputs(expected), "token" if policy.config.use_proprio else "token_noproprio"
    ids, logits = policy.decode(inputs, lambda lg, _: distribution.greedy(lg))
    embedded = policy._prefix(inputs)
    hidden = expected[f"{prefix}_hidden"]
    assert_close(policy.decoder.states(policy.model, embedded, ids), hidden, LOGIT_TOLERANCE)
    assert_close(policy.decoder.first_state(policy.model, embedded), hidden[:, 0], LOGIT_TOLERANCE)
    assert_close(logits, expected[f"{prefix}_action_logits"], LOGIT_TOLERANCE)
    assert torch.equal(policy.score(inputs, ids).logits, logits)
    _assert_units(policy, policy.codec.decode(ids.numpy()), None, expected[f"{prefix}_actions"])


@torch.no_grad()
def check_oft_regression(policy: OpenVLAPolicy, expected: Arrays) -> None:
    inputs = oft_inputs(expected)
    unread = torch.zeros(len(inputs), policy.config.num_action_tokens, dtype=torch.int64)
    states = policy.decoder.states(policy.model, policy._prefix(inputs), unread)
    assert_close(states, expected["l1_hidden"], LOGIT_TOLERANCE)
    assert_close(policy.unnormalize(policy.regress(inputs).numpy()), expected["l1_actions"], LOGIT_TOLERANCE)


@torch.no_grad()
def check_oft_ragged(policy: OpenVLAPolicy, expected: Arrays) -> None:
    inputs = beside_a_longer_prompt(oft_inputs(expected), policy.config.pad_token_id)
    _, logits = policy.decode(inputs, lambda lg, _: distribution.greedy(lg))
    assert_close(logits[:-1], expected["token_action_logits"], LOGIT_TOLERANCE)


OPENVLA_CHECKS: tuple[Callable[[OpenVLAPolicy, Arrays], None], ...] = (
    check_pixels,
    check_vision,
    check_last_logits,
    check_decoding,
    check_logprobs,
    check_entropy_and_sampling,
    check_actions,
    check_ragged,
)
OFT_CHECKS: tuple[Callable[[OpenVLAPolicy, Arrays], None], ...] = (
    check_oft_tokens,
    check_oft_regression,
    check_oft_ragged,
)


# Conventions that no golden array shows.


def check_known_tokens() -> None:
    codec = UniformActionCodec(vocab_size=32000, num_bins=256, action_dim=1)
    assert codec.encode(np.array([[-1.0], [0.0], [0.5], [1.0]])).tolist() == [31999, 31872, 31808, 31744]
    decoded = codec.decode(np.array([31999, 31872, 31745, 31744]))[:, 0]
    assert_close(decoded, np.array([-254, 0, 254, 254]) / 255, 1e-7)


def check_statistics_of_a_suite() -> None:
    """The suite's own, else those of its data without idle steps."""
    for policy, key in ((load_openvla(), "libero_spatial"), (load_oft(), "libero_spatial_no_noops")):
        policy.use_statistics(None, "libero_spatial")
        assert policy.normalizer.unnorm_key == key


def check_proprio() -> None:
    """The 1% and 99% quantiles become -1 and 1, what lies outside is cut off."""
    config = read_config(OFT)
    stats = config.norm_stats["libero_spatial_no_noops"]["proprio"]
    low, high = np.asarray(stats["q01"]), np.asarray(stats["q99"])
    states = np.stack([low, low + 0.75 * (high - low), high, high + 1.0])
    target = np.repeat([[-1.0], [0.5], [1.0], [1.0]], low.size, axis=1)
    assert_close(Normalizer(config).normalize_proprio(states), target, 1e-5)


class CodePoints:
    """A tokenizer whose ids are the characters, so that a prompt can be read off its ids."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[ord(character) for character in text])


def check_prompt() -> None:
    config = read_config(OPENVLA)
    processor = Processor(config, CodePoints(), Normalizer(config, "libero_spatial"))  # type: ignore[arg-type]
    image = np.zeros((1, 56, 56, 3), np.uint8)
    instructions = ("Open the Drawer", "put the bowl on the stove")
    inputs = processor([Observation(image, np.zeros(8, np.float32), text) for text in instructions])
    for row, text in enumerate(("open the drawer", "put the bowl on the stove")):
        prompt = f"In: What action should the robot take to {text}?\nOut:"
        ids = [1, *map(ord, prompt), 29871]
        padding = inputs.input_ids.shape[1] - len(ids)
        assert inputs.input_ids[row].tolist() == ids + [32000] * padding
        assert inputs.attention_mask[row].tolist() == [True] * len(ids) + [False] * padding


def libero_arrays() -> Arrays:
    return Arrays(HERE / "rlds" / "libero_preprocess.npz")


def upright(frame: np.ndarray) -> np.ndarray:
    """LIBERO renders upside down; turning is the environment adapter's work, before any policy sees a frame."""
    return frame[::-1, ::-1]


def libero_processor(images: ImagePipeline) -> Processor:
    config: OpenVLAConfig = read_config(OPENVLA)
    towers = tuple(replace(tower, image_size=LIBERO_SIZE) for tower in config.towers)
    return Processor(replace(config, towers=towers), None, Normalizer(config, "libero_spatial"), images)


def check_resized(expected: Arrays) -> None:
    """The README of the golden data asks for 2 grey levels on 85% of the pixels and 20 at most; ours come closer."""
    processor = libero_processor(ImagePipeline(jpeg=True, resize="lanczos3"))
    ours = np.concatenate([processor._pixels(upright(frame)[None]) for frame in expected["agentview"]])
    assert_nearly_equal(ours, expected["resized"])


def check_cropped(expected: Arrays) -> None:
    processor = libero_processor(ImagePipeline(center_crop=True))
    ours = np.concatenate([processor._pixels(frame[None]) for frame in expected["resized"]])
    assert_nearly_equal(ours, expected["center_cropped"])


def assert_nearly_equal(ours: np.ndarray, theirs: np.ndarray, share: float = 0.999) -> None:
    """Equal to the grey level, save a few pixels that rounding tips to the next one."""
    assert ours.dtype == theirs.dtype == np.uint8
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(np.int16) - theirs)
    assert difference.max() <= 1, f"largest difference {difference.max()}"
    assert (difference == 0).mean() >= share, f"{(difference == 0).mean():.4%} of the values are equal"
