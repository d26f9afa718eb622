import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.processor import Processor
from vlarl.policies.tiny import init_tiny, tiny_config


def test_prompts_are_lowercased_padded_right_and_masked(observe):
    policy = init_tiny()
    inputs = policy.process([observe(0, "Open The Drawer"), observe(1, "pick up the red cube now please")])
    assert inputs.input_ids[:, 0].tolist() == [1, 1]
    lengths = inputs.attention_mask.sum(1)
    assert lengths[0] < lengths[1] == inputs.input_ids.shape[1]
    assert (inputs.input_ids[0, lengths[0] :] == policy.config.pad_token_id).all()
    assert inputs.attention_mask[0].tolist() == [True] * int(lengths[0]) + [False] * int(lengths[1] - lengths[0])
    same = policy.process([observe(0, "open the drawer")])
    assert torch.equal(same.input_ids[0], inputs.input_ids[0, : lengths[0]])


def test_llamas_empty_token_and_bos_are_added_once():
    words = {"<unk>": 0, "out": 5}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    raw = {k: v for k, v in tiny_config().raw.items() if k != "vlarl"}
    config = parse_config(raw)
    processor = Processor(config, tokenizer, Normalizer(config))
    ids = processor.prompt_ids("x")
    assert ids[0] == 1
    assert ids[-1] == 29871
    assert ids.count(29871) == 1


def test_pixels_stay_as_they_are_at_the_right_size(observe):
    observation = observe(3)
    pixels = init_tiny().process([observation]).pixels
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (1, 1, 3, 56, 56)
    np.testing.assert_array_equal(pixels[0, 0].permute(1, 2, 0).numpy(), observation.images[0])


def test_other_sizes_are_resized_by_antialiased_bicubic(observe):
    observation = observe(3, size=80)
    pixels = init_tiny().process([observation]).pixels
    expected = Image.fromarray(observation.images[0]).resize((56, 56), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(pixels[0, 0].permute(1, 2, 0).numpy(), np.asarray(expected))


def test_bad_observations_are_refused(observe):
    two = init_tiny(num_images=2)
    with pytest.raises(ValueError, match="1 images, this policy reads 2"):
        two.process([observe(0)])
    with pytest.raises(ValueError, match="at least one"):
        two.process([])
    observation = observe(0)
    observation = type(observation)(observation.images, observation.proprio[:5], "x")
    with pytest.raises(ValueError, match="5 numbers, this policy reads 8"):
        init_tiny().process([observation])
    floats = type(observation)(observation.images / 255.0, observation.proprio, "x")
    with pytest.raises(ValueError, match="must be uint8"):
        init_tiny(use_proprio=False).process([floats])


def test_a_folder_without_tokenizer_says_so(observe):
    policy = init_tiny()
    policy.processor.tokenizer = None
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        policy.process([observe(0)])
