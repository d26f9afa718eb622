"""Counts the floating-point operations of a pass and the bytes that it reads, from the config alone.

As `torch.utils.flop_counter` counts: two operations for each product and sum, matrix products and attention only, all
pairs of columns in attention, also those that a causal mask hides. Left out are the projector of the robot's state, one
column of some hundred, and the float32 pass that scores tokens again (decoders.py), which is not part of the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlarl.policies.bench_model import Work
from vlarl.policies.family import BYTES, DtypeName
from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.policies.openvla.memory import PROMPT_LENGTH, Sizes


@dataclass(frozen=True)
class Count:
    """Operations by what they belong to, and the values that are read."""

    base: int = 0  # products with the model's own weights
    adapters: int = 0  # products with the adapters'
    attention: int = 0
    values: int = 0  # of weights and cache

    def __add__(self, other: Count) -> Count:
        return Count(
            self.base + other.base,
            self.adapters + other.adapters,
            self.attention + other.attention,
            self.values + other.values,
        )

    def times(self, factor: int) -> Count:
        """As many of the same part, each with weights of its own."""
        return Count(factor * self.base, factor * self.adapters, factor * self.attention, factor * self.values)

    @property
    def flops(self) -> int:
        """Of a forward pass."""
        return self.base + self.adapters + self.attention

    @property
    def backward_flops(self) -> int:
        """Frozen weights: one product for the gradient of the input; adapters: one more for their own; attention: two
        for each of its two."""
        return self.base + 2 * self.adapters + 2 * self.attention


def linear(fan_in: int, fan_out: int, tokens: int, rank: int | None) -> Count:
    """A layer, with its adapter where there is a rank."""
    low = (rank or 0) * (fan_in + fan_out)
    weights = fan_in * fan_out
    return Count(base=2 * tokens * weights, adapters=2 * tokens * low, values=weights + low)


def attention(rows: int, width: int, queries: int, keys: int) -> Count:
    """Scores and their sums, over all heads together."""
    return Count(attention=4 * rows * width * queries * keys)


class OpenVLAWork:
    """Counts for one model; a rank of None means no adapters."""

    def __init__(self, config: OpenVLAConfig, dtype: DtypeName, prompt_length: int = PROMPT_LENGTH) -> None:
        self.config = config
        self._width = BYTES[dtype]
        self._sizes = Sizes(config, 1, prompt_length)
        self._text = self._sizes.text
        self._prefix = self._sizes.prefix
        self._num_tokens = config.num_action_tokens
        self._tail = self._num_tokens + (1 if config.decoder == "parallel" else -1)  # columns after the prompt

    def generation(self, rows: int, rank: int | None) -> list[Work]:
        """The passes of a batch of decisions, from pixels to the last token."""
        if self.config.decoder == "parallel":
            return [self._work(self._whole(rows, rank, self._num_tokens + 1, self._num_tokens))]
        steps = [self._step(rows, rank, self._prefix + done) for done in range(1, self._num_tokens)]
        return [self._work(self._whole(rows, rank, 0, 1)), *map(self._work, steps)]

    def prefill(self, rows: int, rank: int | None) -> list[Work]:
        """The pass over images and prompt."""
        return [self._work(self._whole(rows, rank, 0, 1))]

    def scoring(self, rows: int, rank: int | None) -> Count:
        """The forward pass of an update: all tokens given."""
        return self._whole(rows, rank, self._tail, self._num_tokens)

    def update(self, rows: int, rank: int | None, recompute: bool) -> list[Work]:
        """Forward and backward of a microbatch; without adapters, weights have gradients of their own."""
        count = self.scoring(rows, rank)
        own = count.base if rank is None else 0
        flops, values = count.flops + count.backward_flops + own, 2 * count.values
        if recompute:
            again = self.recomputed(rows, rank)
            flops, values = flops + again.flops, values + again.values
        return [Work(flops, values * self._width)]

    def recomputed(self, rows: int, rank: int | None) -> Count:
        """What runs again in the backward pass: each layer up to its last product, whose result nothing reads."""
        text, tail = self._text, self._tail
        outside = self._projector(rows, rank) + self._patches(rows)
        outside += linear(text.hidden, self.config.num_action_bins, rows * self._num_tokens, None)
        columns = (text.layers - 1) * rows * (self._prefix + tail) + rows * self._num_tokens
        ends = linear(text.inner, text.hidden, columns, rank)
        for tower in self.config.towers:
            tokens = self._sizes.tower_tokens(tower) * rows
            ends += linear(tower.mlp_dim, tower.embed_dim, tokens, rank).times(tower.depth - 1)
        count = self.scoring(rows, rank)
        return Count(
            count.base - outside.base - ends.base,
            count.adapters - outside.adapters - ends.adapters,
            count.attention,
            count.values,  # nearly all of them
        )

    def _work(self, count: Count) -> Work:
        return Work(count.flops, count.values * self._width)

    def _whole(self, rows: int, rank: int | None, tail: int, read: int) -> Count:
        """Images and prompt with `tail` more columns, of which `read` are read at the end."""
        columns = self._prefix + tail
        layers = self._layer(rows, rank, columns, columns, columns).times(self._text.layers - 1)
        last = self._layer(rows, rank, columns, read, columns)
        head = linear(self._text.hidden, self.config.num_action_bins, rows * read, None)
        return self._vision(rows, rank) + layers + last + head

    def _step(self, rows: int, rank: int | None, seen: int) -> Count:
        """One more token, which attends to `seen` columns, itself among them."""
        layers = self._layer(rows, rank, 1, 1, seen).times(self._text.layers)
        cached = rows * (seen - 1) * self._text.layers * 2 * self._text.keys
        head = linear(self._text.hidden, self.config.num_action_bins, rows, None)
        return replace(layers + head, values=layers.values + head.values + cached)

    def _layer(self, rows: int, rank: int | None, columns: int, computed: int, seen: int) -> Count:
        """Keys and values of `columns`; queries and MLP of `computed` ones, which attend to `seen`."""
        text = self._text
        keys = linear(text.hidden, text.keys, rows * columns, rank).times(2)
        queries = linear(text.hidden, text.queries, rows * computed, rank)
        queries += linear(text.queries, text.hidden, rows * computed, rank)
        mlp = linear(text.hidden, text.inner, rows * computed, rank).times(2)
        mlp += linear(text.inner, text.hidden, rows * computed, rank)
        return keys + queries + mlp + attention(rows, text.queries, computed, seen)

    def _vision(self, rows: int, rank: int | None) -> Count:
        """Towers up to the block before the last, and the projector."""
        images, total = rows * self.config.num_images, self._patches(rows) + self._projector(rows, rank)
        for tower in self.config.towers:
            dim, inner = tower.embed_dim, tower.mlp_dim
            tokens = self._sizes.tower_tokens(tower) // self._sizes.num_images
            block = linear(dim, 3 * dim, images * tokens, rank) + linear(dim, dim, images * tokens, rank)
            block += linear(dim, inner, images * tokens, rank) + linear(inner, dim, images * tokens, rank)
            block += attention(images, dim, tokens, tokens)
            if self.config.use_film:
                block += linear(self._text.hidden, dim, images, None).times(2)
            total += block.times(tower.depth - 1)
        return total

    def _patches(self, rows: int) -> Count:
        """The first layer of each tower."""
        images, total = rows * self.config.num_images, Count()
        for tower in self.config.towers:
            total += linear(3 * tower.patch_size**2, tower.embed_dim, images * tower.num_patches, None)
        return total

    def _projector(self, rows: int, rank: int | None) -> Count:
        towers, hidden = self.config.towers, self._text.hidden
        channels, patches = sum(tower.embed_dim for tower in towers), rows * self._sizes.patches
        if len(towers) == 1:
            return linear(channels, hidden, patches, rank) + linear(hidden, hidden, patches, rank)
        first = linear(channels, 4 * channels, patches, rank) + linear(4 * channels, hidden, patches, rank)
        return first + linear(hidden, hidden, patches, rank)
