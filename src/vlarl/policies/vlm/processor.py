"""Prompts -> VlmInputs, by the model's own chat template, tokenizer and image processor: its ids are the only ids.

Each prompt is processed alone, so that what it becomes does not depend on its batch, and an error can name it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import transformers
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES
from transformers.utils.import_utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from vlarl.errors import UsageError, install_command
from vlarl.json_files import read_object
from vlarl.policies.vlm.inputs import TOKEN_TYPES, VISION, Ragged, VlmInputs
from vlarl.types import Observation, Prompt, UInt8Array, message_text

UNREAD = ("num_crops", "rows", "cols", "video_metadata")  # outputs of processors that models don't read
USUAL_FPS = 2.0  # at which vision-language models sample videos


class PromptProcessor:
    """Reads prompts as one model does."""

    def __init__(self, processor: Any, *, reads_images: bool, in_rows: bool) -> None:
        """`processor` is the model's own, or its tokenizer alone where it reads only text. `in_rows`: its images come
        as a row for each prompt."""
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.reads_images = reads_images
        self.in_rows = in_rows
        self.knows_videos = "video_processor" in inspect.signature(type(processor).__init__).parameters
        self._image_tokens: dict[tuple[int, int], tuple[int, int]] = {}  # by height and width, as far as was needed

    def __call__(self, observations: Sequence[Observation]) -> VlmInputs:
        """One row for each observation, on the CPU. A prompt of several, as members of a group have it, is processed
        once."""
        prompts = [prompt_of(each) for each in observations]
        rows: dict[int, VlmInputs] = {}  # by the prompt's identity: it is kept above, so that no other one gets it
        for index, prompt in enumerate(prompts):
            if id(prompt) not in rows:
                rows[id(prompt)] = self._row(prompt, f"prompt {index} ({_shown(prompt)})")
        return VlmInputs.cat([rows[id(prompt)] for prompt in prompts])

    def length(self, prompt: Prompt) -> int:
        """Tokens of a prompt as `__call__` makes them, counted without processing its images: an image adds as many
        tokens as a black one of its size. UsageError for what `__call__` refuses."""
        sample = f"the prompt ({_shown(prompt)})"
        if prompt.videos:
            return int(self._row(prompt, sample).lengths[0])
        ids = self._text_ids(prompt, sample)
        images = [self._image_size(image.shape[0], image.shape[1]) for image in prompt.images]
        if not ids:
            raise UsageError(f"{sample} is empty: give it some text.")
        for kind, named in (("image", sum(placeholders for _, placeholders in images)), ("video", 0)):
            token = getattr(self.processor, f"{kind}_token_id", None)
            if self.reads_images and token is not None and ids.count(token) != named:
                raise UsageError(f"{sample} has tokens of {kind}s in its text: take them out.")
        return len(ids) + sum(added for added, _ in images)

    def _text_ids(self, prompt: Prompt, sample: str) -> list[int]:
        """The tokens of a prompt before its images take the place of their placeholders."""
        text, special = self._text(prompt, self._messages(prompt, sample), sample)
        return list(self.tokenizer(text=[text], add_special_tokens=special)["input_ids"][0])

    def _image_size(self, height: int, width: int) -> tuple[int, int]:
        """The tokens that an image of this size adds to those of its placeholder, and how many tokens of images the
        placeholder has."""
        if (height, width) not in self._image_tokens:
            black = np.zeros((height, width, 3), np.uint8)
            prompt = Prompt(({"role": "user", "content": [{"type": "image"}]},), (black,))
            sample = f"an image of {height} x {width} pixels"
            ids = self._text_ids(prompt, sample)
            added = int(self._row(prompt, sample).lengths[0]) - len(ids)
            self._image_tokens[height, width] = added, ids.count(getattr(self.processor, "image_token_id", -1))
        return self._image_tokens[height, width]

    def _text(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], sample: str) -> tuple[str, bool]:
        """The text of a prompt, and whether the tokenizer adds the tokens that begin and end one."""
        if self._is_plain(prompt):
            return "".join(message_text(message) for message in prompt.messages), True
        text = self._rendered(messages, sample)
        # Templates begin with the token that begins a text, where there is one: a second one is not added.
        begin = getattr(self.tokenizer, "bos_token", None)
        return text, self.reads_images and not (begin and text.startswith(begin))

    def _row(self, prompt: Prompt, sample: str) -> VlmInputs:
        """One row; `sample` names the prompt in messages."""
        if self.reads_images and not self.knows_videos:
            prompt = frames_as_images(prompt)
        messages = self._messages(prompt, sample)
        images, videos = self._media(messages, prompt, sample)
        text, special = self._text(prompt, messages, sample)
        given: dict[str, Any] = {"images": [images]} if images else {}
        if videos:
            # The frames were chosen where the prompt was read (prompts.video_frames): none of them is left out here.
            given |= {"videos": [videos], "video_metadata": [self._rates(prompt)], "do_sample_frames": False}
        reader = self.processor if self.reads_images else self.tokenizer
        try:
            encoded = reader(text=[text], **given, add_special_tokens=special, return_tensors="pt")
        except (ValueError, IndexError, StopIteration) as error:
            raise UsageError(f"{sample} can't be processed: {error}") from error
        row = self._inputs(encoded)
        if row.ids.shape[1] == 0:
            raise UsageError(f"{sample} is empty: give it some text.")
        self._check_features(row, sample)
        return row

    @property
    def has_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return any(getattr(owner, "chat_template", None) for owner in (self.processor, self.tokenizer))

    def end_of_turn(self, stops: Sequence[int]) -> int:
        """The one of the model's stop tokens that ends its turn: as its template has it, else its tokenizer's.

        Models may list others first: the end of a document, or of a call of a tool.
        """
        if self.has_template:
            turns = [("user", "say"), ("assistant", "said")]
            messages = [{"role": role, "content": self._content(text)} for role, text in turns]
            with suppress(TemplateError):  # of templates that refuse such a conversation
                _, _, after = self._render(messages, add_generation_prompt=False).rpartition("said")
                following = self.tokenizer(after, add_special_tokens=False).input_ids
                if ends := [int(token) for token in following if token in stops]:
                    return ends[0]
        own = self.tokenizer.eos_token_id
        return int(own) if own in stops else stops[0]

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self.reads_images else text

    def probes(self) -> list[Observation]:
        """A few fixed prompts of different lengths; where the model reads images, one has an image of noise."""
        texts = ("probe", "a probe of more words")
        prompts = [Prompt(({"role": "user", "content": text},), conversational=False) for text in texts]
        if self.reads_images and self.has_template:
            prompts.append(small_prompt("image"))
        return [Observation.of_prompt(prompt) for prompt in prompts]

    def _is_plain(self, prompt: Prompt) -> bool:
        """Whether a prompt is a text that the model continues as it is, without a template, as in TRL."""
        return not (prompt.conversational or prompt.images or prompt.videos)

    def _messages(self, prompt: Prompt, sample: str) -> list[dict[str, Any]]:
        """Messages as the template reads them: lists of parts for models with images, texts for others."""
        if not prompt.messages:
            raise UsageError(f"{sample} has no messages: give it at least one.")
        messages = [dict(message) for message in prompt.messages]
        for message in messages:
            parts = _parts(message.get("content", ""))
            if self.reads_images:
                message["content"] = parts
            elif any(part["type"] != "text" for part in parts):
                raise UsageError(
                    f"{sample} has images or videos, and the model reads text only: use a model with both."
                )
            else:
                message["content"] = "".join(str(part["text"]) for part in parts)
        return messages

    def _rendered(self, messages: Sequence[Mapping[str, Any]], sample: str) -> str:
        """The text of a conversation up to where the model's turn begins."""
        if not self.has_template:
            raise UsageError(
                "the model has no chat template, which turns messages into a prompt: add a chat_template.jinja to its "
                "folder, that of the instruction-tuned model of its family for example."
            )
        try:
            return self._render(messages, add_generation_prompt=True)
        except TemplateError as error:  # templates refuse roles, such as system, or orders of roles
            raise UsageError(f"{sample} is refused by the model's chat template: {error}") from error

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        owner = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        text = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=owner.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return cast(str, text)

    def _media(self, messages: Sequence[Mapping[str, Any]], prompt: Prompt, sample: str) -> tuple[list[Any], list[Any]]:
        """Images and videos in the order that the messages name them; as many as they name."""
        images, videos = list(prompt.images), list(prompt.videos)
        content = [part for message in messages for part in _parts(message["content"])]
        for kind, found in (("image", images), ("video", videos)):
            named = sum(part["type"] == kind for part in content)
            if named != len(found):
                raise UsageError(f"{sample} names {named} {kind}s and comes with {len(found)}: they must be as many.")
        if videos and getattr(self.processor, "video_processor", None) is None:
            raise UsageError(
                f"{sample} has a video, and the model's video processor needs torchvision: in your clone of vlarl run "
                f"{install_command('video')}, or give the frames as images."
            )
        return [Image.fromarray(image) for image in images], videos  # of an array the side of colours is guessed

    def _rates(self, prompt: Prompt) -> list[VideoMetadata]:
        """When each frame was taken. Where that is not known, as often as the model would have sampled frames."""
        usual = float(getattr(self.processor.video_processor, "fps", None) or USUAL_FPS)
        rates = prompt.video_fps or (None,) * len(prompt.videos)
        return [
            VideoMetadata(len(video), rate or usual, frames_indices=list(range(len(video))))
            for video, rate in zip(prompt.videos, rates, strict=True)
        ]

    def _inputs(self, encoded: Mapping[str, Any]) -> VlmInputs:
        columns: dict[str, Any] = {
            "ids": encoded["input_ids"].long(),
            "attention_mask": encoded["attention_mask"].bool(),
        }
        for name, value in encoded.items():
            if name in ("input_ids", "attention_mask", *UNREAD):
                continue
            if name in TOKEN_TYPES:
                columns[name] = value.long()
            elif name in VISION:
                tensor = torch.as_tensor(value)
                tensor = tensor.bool() if name == "pixel_attention_mask" else tensor
                tensor = tensor[0] if self.in_rows else tensor
                columns[name] = Ragged(tensor, torch.tensor([len(tensor)]))
            else:
                raise UsageError(f"the model's processor gives {name}, which is not supported: use another family.")
        return VlmInputs(**columns)

    def _check_features(self, row: VlmInputs, sample: str) -> None:
        """A prompt has as many image tokens as its images have features, and the same of videos: text may hold such
        tokens, too."""
        if not self.reads_images:
            return
        for kind, pixels, grid in (
            ("image", row.pixel_values, row.image_grid_thw),
            ("video", row.pixel_values_videos, row.video_grid_thw),
        ):
            token = getattr(self.processor, f"{kind}_token_id", None)
            features = self._num_features(pixels, grid)
            if token is None or features is None:
                continue
            tokens = int((row.ids == token).sum())
            if tokens != features:
                raise UsageError(
                    f"{sample} has {tokens} {kind} tokens, but its {kind}s have {features} features: take tokens of "
                    f"{kind}s out of the text, and use the model's own processor files."
                )

    def _num_features(self, pixels: Ragged | None, grid: Ragged | None) -> int | None:
        """Features of the images or videos of one prompt; None where the family does not say."""
        if pixels is None:
            return 0
        merge = getattr(self.processor.image_processor, "merge_size", None)
        if grid is not None and merge is not None:
            return int(grid.values.prod(dim=-1).sum()) // int(merge) ** 2
        length = getattr(self.processor, "image_seq_len", None)
        return None if length is None else int(pixels.counts.sum()) * int(length)


def prompt_of(observation: Observation) -> Prompt:
    """The prompt of an observation; a robot's is its views and its instruction."""
    if observation.prompt is not None:
        return observation.prompt
    content: list[dict[str, str]] = [{"type": "image"}] * len(observation.images)
    message = {"role": "user", "content": [*content, {"type": "text", "text": observation.instruction}]}
    return Prompt((message,), tuple(observation.images))


def small_prompt(kind: Literal["image", "video"]) -> Prompt:
    """A fixed prompt with a small image, or a video of two frames, of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 56, 56, 3), dtype=np.uint8)
    messages = ({"role": "user", "content": [{"type": kind}, {"type": "text", "text": "probe"}]},)
    return Prompt(messages, (noise[0],)) if kind == "image" else Prompt(messages, videos=(noise,))


def frames_as_images(prompt: Prompt) -> Prompt:
    """The same prompt for a model that knows no videos: in place of each video, its frames as images."""
    images, videos = list(prompt.images), list(prompt.videos)
    ordered: list[UInt8Array] = []
    messages = []
    for message in prompt.messages:
        parts: list[dict[str, Any]] = []
        for part in _parts(message.get("content", "")):
            if part["type"] == "video" and videos:
                frames = list(videos.pop(0))
                ordered += frames
                parts += [{"type": "image"} for _ in frames]
                continue
            if part["type"] == "image" and images:
                ordered.append(images.pop(0))
            parts.append(part)
        messages.append({**message, "content": parts})
    return replace(prompt, messages=tuple(messages), images=(*ordered, *images), videos=tuple(videos))


def load_processor(folder: Path, model_type: str, reads_images: bool) -> Any:
    """The model's own processor, or its tokenizer where it reads only text.

    Video processors need torchvision, images don't: without torchvision the processor is loaded without its videos.
    Images are resized by PIL either way, where the family has that variant: torchvision resizes to other pixels, and a
    checkpoint must not depend on what else is installed.
    """
    if not reads_images:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if is_torchvision_available():
        processor = cast(Any, AutoProcessor).from_pretrained(folder, trust_remote_code=False)
    else:
        processor = _processor_without_videos(folder, model_type)
    images = cast(Any, AutoImageProcessor).from_pretrained(folder, backend="pil", trust_remote_code=False)
    processor.image_processor = images
    return processor


def _processor_without_videos(folder: Path, model_type: str) -> Any:
    named = [
        read_object(folder / name).get("processor_class")
        for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
        if (folder / name).is_file()
    ]
    name = next((name for name in named if name), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise UsageError(f"{folder}: there is no processor {name} in transformers {transformers.__version__}.")
    images_only = [attribute for attribute in kind.get_attributes() if attribute != "video_processor"]
    without_videos = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: images_only)})
    return cast(Any, without_videos).from_pretrained(folder)


def _parts(content: Any) -> list[dict[str, Any]]:
    """The parts of a message; a plain text is one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]


def _shown(prompt: Prompt, longest: int = 60) -> str:
    """The beginning of a prompt's last text, to recognise it by."""
    text = " ".join(prompt.text.split()) if prompt.messages else "no text"
    return repr(text if len(text) <= longest else f"{text[:longest]}…")
