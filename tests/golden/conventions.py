"""Conventions of the published checkpoints that no golden array shows, as plain functions like the comparisons."""

from types import SimpleNamespace

import numpy as np
from comparisons import OFT, OPENVLA, load_oft, load_openvla, oft_key
from fakes.golden_arrays import assert_close

from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.config import read_config
from vlarl.policies.openvla.processor import Processor
from vlarl.types import Observation


def check_known_tokens() -> None:
    """Of OpenVLA-7B, as published."""
    codec = UniformActionCodec(vocab_size=32000, num_bins=256, action_dim=1)
    assert codec.encode(np.array([[-1.0], [0.0], [0.5], [1.0]])).tolist() == [31999, 31872, 31808, 31744]
    decoded = codec.decode(np.array([31999, 31872, 31745, 31744]))[:, 0]
    assert_close(decoded, np.array([-254, 0, 254, 254]) / 255, 1e-7)


def check_statistics_of_a_suite() -> None:
    """The suite's own, else those of its data without idle steps."""
    for model in (load_openvla(), load_oft()):
        known = model.policy.config.norm_stats
        for suite in {key.removesuffix("_no_noops") for key in known}:
            model.policy.use_statistics(None, suite)
            assert model.policy.normalizer.unnorm_key == (suite if suite in known else f"{suite}_no_noops")


def check_proprio() -> None:
    """The 1% and 99% quantiles become -1 and 1, what lies outside is cut off."""
    config = read_config(OFT)
    stats = config.norm_stats[oft_key()]["proprio"]
    low, high = np.asarray(stats["q01"]), np.asarray(stats["q99"])
    states = np.stack([low, low + 0.75 * (high - low), high, high + 1.0])
    target = np.repeat([[-1.0], [0.5], [1.0], [1.0]], low.size, axis=1)
    assert_close(Normalizer(config, oft_key()).normalize_proprio(states), target, 1e-5)


class CodePoints:
    """A tokenizer whose ids are the characters, so that a prompt can be read off its ids."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[ord(character) for character in text])


def check_prompt() -> None:
    config = read_config(OPENVLA)
    processor = Processor(config, CodePoints(), Normalizer(config))  # type: ignore[arg-type]
    image = np.zeros((config.num_images, config.image_size, config.image_size, 3), np.uint8)
    instructions = ("Open the Drawer", "put the bowl on the stove")
    inputs = processor([Observation(image, np.zeros(config.proprio_dim, np.float32), text) for text in instructions])
    bos = config.raw["text_config"].get("bos_token_id", 1)
    for row, text in enumerate(("open the drawer", "put the bowl on the stove")):
        prompt = f"In: What action should the robot take to {text}?\nOut:"
        ids = [bos, *map(ord, prompt), 29871]  # Llama's empty token last
        padding = inputs.input_ids.shape[1] - len(ids)
        assert inputs.input_ids[row].tolist() == ids + [config.raw["pad_token_id"]] * padding
        assert inputs.attention_mask[row].tolist() == [True] * len(ids) + [False] * padding
