from dataclasses import replace
from io import BytesIO
from threading import get_ident

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from vlarl.errors import UsageError
from vlarl.images.bicubic import bicubic_resize
from vlarl.images.crop import center_crop
from vlarl.images.jpeg import jpeg_round_trip
from vlarl.images.lanczos import lanczos_resize
from vlarl.policies.openvla.actions import Normalizer
from vlarl.policies.openvla.config import OpenVLAConfig, parse_config
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.processor import Processor, preprocessor_config
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
    config = parse_config({**raw, "text_config": {**raw["text_config"], "vocab_size": 32064}})
    processor = Processor(config, tokenizer, Normalizer(config))
    ids = processor.prompt_ids("x")
    assert ids[0] == 1
    assert ids[-1] == 29871
    assert ids.count(29871) == 1


def test_a_tokenizer_of_another_model_is_named():
    tokenizer = Tokenizer(WordLevel({"<unk>": 40_000}, unk_token="<unk>"))
    config = tiny_config()
    with pytest.raises(
        UsageError, match="model has 1088 rows for them: the checkpoint's tokenizer.json or config.json"
    ):
        Processor(config, tokenizer, Normalizer(config)).prompt_ids("x")


def test_the_configs_template_is_used_and_bos_only_where_there_is_one():
    config = replace(
        tiny_config(), prompt_template="what action should the robot take to {instruction} now", bos_id=None
    )
    tokenizer = init_tiny().tokenizer
    tokenizer.post_processor = None
    words = tokenizer.encode("what action should the robot take to open the drawer now").ids
    assert Processor(config, tokenizer, Normalizer(config)).prompt_ids("Open the Drawer") == tuple(words)


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


def with_strategy(strategy: str) -> OpenVLAConfig:
    return parse_config({**tiny_config().raw, "image_resize_strategy": strategy})


def prepared(config: OpenVLAConfig, image: np.ndarray) -> np.ndarray:
    return Processor(config, None, Normalizer(config))._pixels(image[None])[0]


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_resize_crop_cuts_the_ends_of_the_longer_side_off():
    image = noise(56, 112)
    np.testing.assert_array_equal(prepared(with_strategy("resize-crop"), image), image[:, 28:84])
    twice = np.asarray(Image.fromarray(noise(112, 200)).resize((100, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(prepared(with_strategy("resize-crop"), noise(112, 200)), twice[:, 22:78])


def test_letterbox_pads_with_the_last_towers_mean():
    image = noise(28, 56)
    boxed = prepared(with_strategy("letterbox"), image)
    np.testing.assert_array_equal(boxed[14:42], image)
    assert (boxed[:14] == 127).all()
    assert (boxed[42:] == 127).all()
    tall = prepared(with_strategy("letterbox"), image.transpose(1, 0, 2))
    np.testing.assert_array_equal(tall, boxed.transpose(1, 0, 2))
    # An odd rest stays open, as in the original: 29 + 2 * 13 rows, scaled until the shorter side fits.
    odd = prepared(with_strategy("letterbox"), noise(29, 56))
    padded = np.full((55, 56, 3), 127, np.uint8)
    padded[13:42] = noise(29, 56)
    scaled = np.asarray(Image.fromarray(padded).resize((57, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(odd, scaled[:, :56])


def test_an_unknown_strategy_is_refused_and_a_known_one_is_written_back():
    config = with_strategy("stretch")
    with pytest.raises(ValueError, match="'stretch'.*letterbox"):
        Processor(config, None, Normalizer(config))
    assert preprocessor_config(with_strategy("letterbox"))["image_resize_strategy"] == "letterbox"


def test_the_pipeline_runs_its_steps_in_order():
    config, image = tiny_config(), noise(80, 80)
    pipeline = ImagePipeline(jpeg=True, resize="lanczos3", center_crop=True)
    ours = Processor(config, None, Normalizer(config), pipeline)._pixels(image[None])[0]
    np.testing.assert_array_equal(ours, center_crop(lanczos_resize(jpeg_round_trip(image), 56)))
    cropped = Processor(config, None, Normalizer(config), ImagePipeline(center_crop=True))._pixels(image[None])[0]
    np.testing.assert_array_equal(cropped, center_crop(bicubic_resize(image, 56, "resize-naive", (0, 0, 0))))


def test_threads_divide_the_images_and_change_nothing(observe):
    policy = init_tiny()
    policy.processor.images = ImagePipeline(jpeg=True, resize="lanczos3", center_crop=True)
    observations = [observe(seed, size=70 + seed) for seed in range(9)]
    alone = policy.process(observations).pixels
    used = set()
    prepare = policy.processor._pixels

    def watched(images):
        used.add(get_ident())
        return prepare(images)

    policy.processor._pixels = watched
    torch.set_num_threads(3)
    assert policy.process(observations).pixels.equal(alone)
    assert get_ident() not in used
    used.clear()
    policy.processor.images = ImagePipeline()
    policy.process([observe(seed, size=56) for seed in range(9)])
    assert used == {get_ident()}, "images that already have the model's size are not worth a thread"


def test_lanczos_and_crop_keep_what_they_must():
    flat = np.full((37, 50, 3), (3, 128, 255), np.uint8)
    np.testing.assert_array_equal(lanczos_resize(flat, 56), np.broadcast_to(flat[0, 0], (56, 56, 3)))
    np.testing.assert_array_equal(lanczos_resize(noise(56, 56), 56), noise(56, 56))
    np.testing.assert_array_equal(center_crop(noise(56, 56), area=1.0), noise(56, 56))
    ramp = np.repeat(np.arange(101, dtype=np.uint8)[None, :, None] * 2, 101, axis=0).repeat(3, axis=2)
    middle = center_crop(ramp, area=0.25)  # the half of each side from 25 to 75
    assert (middle[0, 0, 0], middle[50, 50, 0], middle[100, 100, 0]) == (50, 100, 150)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (51, 100), (33, 17)])
def test_jpeg_is_near_an_exact_decoder_at_any_size(height, width):
    """The fast decoder is off by a few grey levels; chroma that is not interpolated is off by many at an edge."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2 + 1], image[: height // 2 + 1, :, 2] = (200, 40, 40), 180
    file = BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    difference = np.abs(jpeg_round_trip(image).astype(int) - np.asarray(Image.open(file)))
    assert difference.max() <= 8


def test_bad_observations_are_refused(observe):
    two = init_tiny(num_images=2)
    with pytest.raises(ValueError, match="1 images, this policy reads 2"):
        two.process([observe(0)])
    with pytest.raises(ValueError, match="at least one"):
        two.process([])
    observation = observe(0)
    observation = type(observation)(observation.images, observation.proprio[:5], "x")
    with pytest.raises(ValueError, match="5 values, this policy reads 8"):
        init_tiny().process([observation])
    floats = type(observation)(observation.images / 255.0, observation.proprio, "x")
    with pytest.raises(ValueError, match="must be uint8"):
        init_tiny(use_proprio=False).process([floats])


def test_a_folder_without_tokenizer_says_so(observe):
    policy = init_tiny()
    policy.processor.tokenizer = None
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        policy.process([observe(0)])
