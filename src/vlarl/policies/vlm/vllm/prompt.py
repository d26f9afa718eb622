"""A row of VlmInputs as a vLLM prompt that bypasses its processors: the policy's own processor has made ids and pixels.

    ids     … <|vision_start|> <|image_pad|> <|image_pad|> <|vision_end|> …
    range                      offset, length 2                              of an item with a grid of 1 x 2 x 4 patches

Every image and every video is an item. Its range of tokens in the prompt is found here, and must have as many tokens as
the item has features: vLLM puts features in the place of tokens by these ranges alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import BatchFeature
from vllm.inputs import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from vlarl.errors import UsageError, VlarlError
from vlarl.policies.vlm.inputs import VlmInputs


@dataclass(frozen=True)
class Modality:
    """What vLLM reads of one kind of item, by the names of its fields."""

    name: str
    pixels: str
    grid: str
    others: tuple[str, ...] = ()  # one value an item


MODALITIES = (
    Modality("image", "pixel_values", "image_grid_thw"),
    Modality("video", "pixel_values_videos", "video_grid_thw", ("second_per_grid_ts",)),
)


@dataclass(frozen=True)
class Layout:
    """How a model lays images and videos out in its prompts."""

    tokens: dict[str, int]  # modality -> the token that stands for a feature
    merge: int  # patches of a side that become one feature
    frames_apart: bool  # the frames of a video have text between them, and a token before each
    positions: Callable[[VlmInputs], torch.Tensor]  # one row -> [3, P] as the learner counts them


def processed_prompt(inputs: VlmInputs, row: int, layout: Layout) -> TokensInput | MultiModalInput:
    """One row, with its images and videos if it has some."""
    own = inputs.rows(slice(row, row + 1))
    ids = own.ids[0][own.attention_mask[0]]
    values: dict[str, torch.Tensor] = {}
    fields: dict[str, MultiModalFieldConfig] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[PlaceholderRange]] = {}
    for modality in MODALITIES:
        columns = {name: getattr(own, name) for name in (modality.pixels, modality.grid, *modality.others)}
        found = {name: column.values for name, column in columns.items() if column is not None}
        if not len(found.get(modality.grid, ())):
            continue
        patches = found[modality.grid].prod(dim=-1)
        values |= found
        fields |= {name: MultiModalFieldConfig.batched(modality.name, keep_on_cpu=True) for name in found}
        fields[modality.pixels] = MultiModalFieldConfig.flat_from_sizes(modality.name, patches)
        split = {**found, modality.pixels: torch.split(found[modality.pixels], patches.tolist())}
        hashes[modality.name] = [_digest(item) for item in zip(*split.values(), strict=True)]
        sizes = (patches // layout.merge**2).tolist()
        apart = layout.frames_apart and modality.name == "video"
        is_token = torch.eq(ids, layout.tokens[modality.name])
        ranges[modality.name] = _ranges(is_token, sizes, apart, f"prompt {row}")
    if not values:
        return tokens_input(ids.tolist())
    if "video" in ranges and not layout.frames_apart:
        _check_positions(layout.positions(own), ranges["video"], f"prompt {row}")
    return mm_input(
        prompt_token_ids=ids.tolist(),
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(BatchFeature(values), fields),
        mm_hashes=hashes,
        mm_placeholders=ranges,
    )


def _ranges(is_token: torch.Tensor, sizes: Sequence[int], apart: bool, sample: str) -> list[PlaceholderRange]:
    """The range of tokens of each item; `is_token` [P] says which tokens of the prompt stand for a feature."""
    places = is_token.nonzero().flatten().tolist()
    if len(places) != sum(sizes):
        raise VlarlError(f"{sample} has {len(places)} tokens for {sum(sizes)} features: vLLM would misplace them")
    found, begin = [], 0
    for size in sizes:
        first, last = places[begin], places[begin + size - 1]
        begin += size
        if apart:
            first -= 1  # vLLM looks for the token before the first frame, from here on
            found.append(PlaceholderRange(first, last - first + 1, is_embed=is_token[first : last + 1]))
            continue
        if last - first + 1 != size:
            raise VlarlError(f"{sample} has the tokens of an image in several places: vLLM would misplace its features")
        found.append(PlaceholderRange(first, size))
    return found


def _check_positions(positions: torch.Tensor, videos: Sequence[PlaceholderRange], sample: str) -> None:
    """Refuse a video that is followed by other positions in vLLM, where they continue after the largest one so far.

    In transformers 5.19 they continue after the height and width of a frame, however long the video is.
    """
    for video in videos:
        end = video.offset + video.length
        after = positions[:, end : end + 1]
        if len(after[0]) and int(after.max()) != int(positions[:, :end].max()) + 1:
            raise UsageError(
                f"{sample} has a video whose length in time is more than its frames' height and width in tokens: vLLM "
                "counts the positions after it differently from transformers, and its log-probs would be wrong. Use "
                "the torch engine (vllm.num_engines 0), or a model that writes the time of its frames, as Qwen3-VL."
            )


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """By which vLLM recognises an item that it has seen; also a video's time, which positions follow from."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
