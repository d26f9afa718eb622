"""Prompts become the ids of the model's own processor; what can't be processed is named."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import split
from fakes.vlm_models import IDS, TEXT_TEMPLATE, WITH_IMAGES, observation, random_image, write_model
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlarl.errors import UsageError
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.inputs import VlmInputs
from vlarl.types import Observation, Prompt


def prompted(*content, images=(), videos=(), fps=(), role="user"):
    prompt = Prompt(({"role": role, "content": list(content)},), images, videos, fps)
    return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), "", prompt)


def text(words):
    return {"type": "text", "text": words}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def ids_of(inputs, row=0):
    return inputs.ids[row][inputs.attention_mask[row]].tolist()


def test_the_prompt_is_the_rendered_template(shared):
    policy = shared("qwen2")
    found = ids_of(policy.process([observation("hi", system="be brief")]))
    tokenizer = policy.processor.tokenizer
    wanted = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert found == tokenizer.encode(wanted) and tokenizer.decode(found) == wanted


def test_a_plain_text_is_continued_as_it_is(shared):
    """A row of a dataset without messages gets no template, as in TRL."""
    for kind in ("qwen2", "qwen2_5_vl"):
        policy = shared(kind)
        plain = Prompt(({"role": "user", "content": "2 + 3 ="},), conversational=False)
        given = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), "", plain)
        assert policy.processor.tokenizer.decode(ids_of(policy.process([given]))) == "2 + 3 ="


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_a_text_begins_with_one_beginning(folder_of, kind):
    """A tokenizer that adds a token at the beginning, and a template that has it already or leaves it to the tokenizer."""
    policy = read_policy(folder_of(kind))
    tokenizer = policy.processor.tokenizer
    tokenizer.bos_token = "<|endoftext|>"
    begin = IDS["<|endoftext|>"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    owner = policy.processor.processor if policy.processor.reads_images else tokenizer
    own = owner.chat_template
    for template, text_models in ((own, 0), ("<|endoftext|>" + own, 1)):
        owner.chat_template = template
        found = ids_of(policy.process([observation("hi")]))
        wanted = text_models if kind == "qwen2" else 1
        assert found.count(begin) == wanted and (not wanted or found[0] == begin)


def test_an_image_of_three_rows_is_not_taken_for_channels(shared):
    policy = shared("qwen2_5_vl")
    thin = np.arange(3 * 60 * 3, dtype=np.uint8).reshape(3, 60, 3)
    found = policy.process([prompted(IMAGE, text("?"), images=(thin,))])
    assert found.image_grid_thw.values[0].tolist() == [1, 2, found.image_grid_thw.values[0, 2]]
    assert int(found.image_grid_thw.values[0, 2]) > 2, "wider than high"


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_ids_and_pixels_are_those_of_the_models_own_processor(shared, kind):
    """Three images of different sizes between words, against one call of the processor."""
    policy = shared(kind)
    images = [random_image(np.random.default_rng(i)) for i in range(3)]
    given = prompted(text("a"), IMAGE, IMAGE, text("b"), IMAGE, images=tuple(images))
    found = policy.process([observation("x"), given])
    mark = "<image>" if kind == "smolvlm" else "<|vision_start|><|image_pad|><|vision_end|>"
    rendered = f"<|im_start|>user\na{mark}{mark}b{mark}<|im_end|>\n<|im_start|>assistant\n"
    wanted = policy.processor.processor(text=[rendered], images=[images], return_tensors="pt")
    assert ids_of(found, 1) == wanted["input_ids"][0].tolist()
    pixels = found.rows(slice(1, 2)).pixel_values
    assert torch.equal(pixels.padded() if kind == "smolvlm" else pixels.values, wanted["pixel_values"])
    assert found.pixel_values.counts.tolist()[0] == 0, "the first row has no image"


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_rows_keep_their_images_in_any_batch(shared, kind):
    policy = shared(kind)
    observations = [observation("x" * i, i % 3, i) for i in range(5)]
    together = policy.process(observations)
    for row, each in enumerate(observations):
        alone, cut = policy.process([each]), split(together)[row]
        assert torch.equal(alone.ids, cut.ids) and torch.equal(alone.attention_mask, cut.attention_mask)
        if alone.pixel_values is None:
            assert not cut.pixel_values.counts.any() and len(cut.pixel_values.values) == 0
        else:
            assert torch.equal(alone.pixel_values.values, cut.pixel_values.values)
    order = torch.tensor([3, 1])
    picked = together.rows(order)
    joined = VlmInputs.cat([split(together)[3], split(together)[1]])
    assert all(torch.equal(a, b) for a, b in zip(picked.tensors(), joined.tensors(), strict=True))
    assert together.rows(slice(0, 0)).ids.shape == (0, 0) and len(together.empty()) == 0


def test_rows_without_images_join_those_with_some(shared):
    policy = shared("qwen2_5_vl")
    plain, seen = policy.process([observation("a")]), policy.process([observation("b", 2)])
    for joined in (VlmInputs.cat([plain, seen]), VlmInputs.cat([seen, plain]).rows(torch.tensor([1, 0]))):
        assert joined.image_grid_thw.counts.tolist() == [0, 2]
        assert torch.equal(joined.pixel_values.values, seen.pixel_values.values)
    assert VlmInputs.cat([plain, plain]).pixel_values is None


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm", "qwen2"])
def test_members_of_a_group_are_processed_once(shared, monkeypatch, kind):
    """The rows are those of prompts that are each an object of their own; equal prompts that are not one, too."""
    policy = shared(kind)
    images = 2 if kind != "qwen2" else 0
    first, second = observation("how many?", images, 1), observation("which?", images, 2)
    group = [first] * 4 + [second] * 4 + [replace(first), replace(first, prompt=replace(first.prompt))]
    alone = VlmInputs.cat([policy.process([each]) for each in group])
    calls = []
    row = policy.processor._row
    monkeypatch.setattr(policy.processor, "_row", lambda *given: (calls.append(given), row(*given))[1])
    found = policy.process(group)
    assert [sample.split(" (")[0] for _, sample in calls] == ["prompt 0", "prompt 4", "prompt 9"]
    assert all(torch.equal(a, b) for a, b in zip(found.tensors(), alone.tensors(), strict=True))
    found.ids[0].zero_()
    assert torch.equal(found.ids[1:], alone.ids[1:]), "members of a group are rows of their own"
    robots = [Observation(np.full((1, 28, 28, 3), i, np.uint8), np.zeros(8, np.float32), str(i)) for i in range(3)]
    if images:
        assert not torch.equal(*(part.pixel_values.values for part in split(policy.process(robots))[:2]))


def test_prompts_are_padded_on_the_left_for_the_model(shared):
    policy = shared("qwen2")
    inputs = policy.process([observation("a"), observation("abc" * 5)])
    prefix = policy.access.prefix(inputs)
    length = int(inputs.lengths[0])
    assert prefix.ids[0, -length:].tolist() == ids_of(inputs) and not prefix.mask[0, :-length].any()
    assert prefix.positions[0, -length:].tolist() == list(range(length))
    assert prefix.next_position.tolist() == inputs.lengths.tolist()


def test_the_position_after_an_image_is_that_of_its_grid_not_of_its_tokens(shared):
    """Qwen's images take as many positions as their longer side has merged patches."""
    policy = shared("qwen2_5_vl")
    inputs = policy.process([observation("a", 1), observation("a")])
    grid = inputs.image_grid_thw.values[0]
    tokens = int(grid.prod()) // 4
    side = int(grid[1:].max()) // 2
    assert tokens > side
    prefix = policy.access.prefix(inputs)
    assert prefix.next_position.tolist() == [int(inputs.lengths[0]) - tokens + side, int(inputs.lengths[1])]


def test_a_robots_observation_is_its_views_and_its_instruction(shared):
    policy = shared("smolvlm")
    views = np.zeros((1, 30, 30, 3), np.uint8)
    found = policy.process([Observation(views, np.zeros(8, np.float32), "open the drawer")])
    assert "open the drawer" in policy.processor.tokenizer.decode(ids_of(found)) and found.pixel_values is not None
    assert policy.num_images == 1 and policy.image_size == 28


def test_frames_are_images_for_a_model_that_knows_no_videos(shared):
    policy = shared("smolvlm")
    rng = np.random.default_rng(0)
    first, video, last = random_image(rng), rng.integers(0, 256, (3, 30, 40, 3), dtype=np.uint8), random_image(rng)
    found = policy.process([prompted(IMAGE, VIDEO, text("?"), IMAGE, images=(first, last), videos=(video,))])
    frames = (first, *video, last)
    wanted = policy.process([prompted(IMAGE, IMAGE, IMAGE, IMAGE, text("?"), IMAGE, images=frames)])
    assert all(torch.equal(a, b) for a, b in zip(found.tensors(), wanted.tensors(), strict=True))


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_pixels_are_the_same_with_and_without_torchvision(shared, folder_of, monkeypatch, kind):
    """Of images that have to be resized, which torchvision does to other pixels."""
    monkeypatch.setattr("vlarl.policies.vlm.processor.is_torchvision_available", lambda: False)
    without = read_policy(folder_of(kind))
    monkeypatch.undo()
    seen = [observation("?", 3, seed) for seed in range(3)]
    found, wanted = shared(kind).process(seen), without.process(seen)
    assert getattr(without.processor.processor, "video_processor", None) is None
    assert all(torch.equal(a, b) for a, b in zip(found.tensors(), wanted.tensors(), strict=True))
    if kind.startswith("qwen"):
        images = Qwen2VLImageProcessorPil.from_pretrained(folder_of(kind))
        pixels = images(images=[Image.fromarray(image) for o in seen for image in o.prompt.images], return_tensors="pt")
        assert torch.equal(found.pixel_values.values, pixels["pixel_values"])


@pytest.mark.parametrize(("kind", "num_frames"), [("qwen2_5_vl", 6), ("qwen3_vl", 6), ("qwen3_vl", 30)])
def test_every_frame_of_a_video_is_read(shared, kind, num_frames):
    """Qwen3-VL's own processor would sample frames a second time. A patch is two frames of 14 x 14 pixels."""
    video = np.random.default_rng(0).integers(0, 256, (num_frames, 28, 28, 3), dtype=np.uint8)
    found = shared(kind).process([prompted(VIDEO, text("?"), videos=(video,))])
    assert found.video_grid_thw.values.tolist() == [[num_frames // 2, 2, 2]]
    assert found.pixel_values_videos.values.shape == (num_frames // 2 * 4, 3 * 2 * 14 * 14)
    assert int((found.ids == IDS["<|video_pad|>"]).sum()) == num_frames // 2


def test_the_time_between_frames_is_that_of_the_video(shared):
    """Two frames together at 4 a second are half a second; without a rate the model's own 2 a second count."""
    video = np.zeros((4, 28, 28, 3), np.uint8)
    for fps, seconds, middle in (
        ((4.0,), 0.5, ("0.1", "0.6")),
        ((None,), 1.0, ("0.2", "1.2")),
        ((), 1.0, ("0.2", "1.2")),
    ):
        given = prompted(VIDEO, text("?"), videos=(video,), fps=fps)
        found = shared("qwen2_5_vl").process([given])
        assert found.second_per_grid_ts.values.tolist() == [seconds]
        written = shared("qwen3_vl").processor.tokenizer.decode(ids_of(shared("qwen3_vl").process([given])))
        assert re.findall("<([0-9.]+) seconds>", written) == list(middle), "between the two frames of a patch"


# What is refused

VIDEO_FRAMES = np.zeros((2, 28, 28, 3), np.uint8)
PIXELS = np.zeros((28, 28, 3), np.uint8)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("qwen2_5_vl", prompted(IMAGE, IMAGE, text("how many?"), images=(PIXELS,)), "names 2 images and comes with 1"),
        ("qwen2_5_vl", prompted(text("how many?"), images=(PIXELS,)), "names 0 images and comes with 1"),
        ("smolvlm", prompted(IMAGE, text("how many?")), "names 1 images and comes with 0"),
        ("qwen2", prompted(IMAGE, text("how many?"), images=(PIXELS,)), "the model reads text only"),
        ("qwen2_5_vl", prompted(text("how many?<|image_pad|>")), "how many.*1 image tokens, .* 0 features"),
        ("smolvlm", prompted(text("how many?<image>")), "prompt 1"),
        ("qwen2_5_vl", prompted(text("how many?<|video_pad|>")), "how many.*1 video tokens, .* 0 features"),
        ("qwen2_5_vl", prompted(IMAGE, text("how many?<|image_pad|>"), images=(PIXELS,)), "prompt 1 .'how many"),
    ],
)
def test_what_does_not_fit_names_the_prompt(shared, kind, given, says):
    policy = shared(kind)
    with pytest.raises(UsageError, match=says) as raised:
        policy.process([observation("fine"), given])
    assert "prompt 1 ('how many?" in str(raised.value)


def test_a_video_without_a_video_processor_names_what_to_install(folder_of):
    policy = read_policy(folder_of("qwen2_5_vl"))
    policy.processor.processor.video_processor = None  # as it is where torchvision is missing
    with pytest.raises(UsageError, match=r"prompt 0 \('how many.*needs torchvision: .*\.\[video\]"):
        policy.process([prompted(VIDEO, text("how many?"), videos=(VIDEO_FRAMES,))])


def test_a_prompt_without_messages_is_refused(shared):
    empty = Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), "", Prompt(()))
    with pytest.raises(UsageError, match="has no messages"):
        shared("qwen2").process([empty])


def test_a_missing_template_is_explained(tmp_path):
    folder = write_model("qwen2", tmp_path / "m")
    assert (folder / "chat_template.jinja").read_text() == TEXT_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"no chat template.*chat_template.jinja"):
        read_policy(folder).process([observation("hi")])


def test_a_role_that_the_template_refuses_is_named(folder_of):
    policy = read_policy(folder_of("qwen2"))
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    policy.processor.tokenizer.chat_template = refusing + TEXT_TEMPLATE
    with pytest.raises(UsageError, match=r"prompt 1 \('how many.*refused by the model's chat template: no system role"):
        policy.process([observation("fine"), observation("how many?", system="be brief")])


def test_the_models_end_tokens_are_those_of_its_generation_config(shared, folder_of):
    assert shared("qwen2").stop_tokens == (IDS["<|im_end|>"],)
    policy = read_policy(folder_of("qwen2"))
    policy.model.generation_config.eos_token_id = [5, 6]
    assert policy.stop_tokens == (5, 6)
    policy.model.generation_config.eos_token_id = None
    assert policy.stop_tokens == (IDS["<|im_end|>"],), "the tokenizer's"
