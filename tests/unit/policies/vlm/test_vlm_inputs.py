"""Rows with different amounts of pixels: a batch takes the memory of its rows, and has them in every order."""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fakes.decisions import split
from fakes.vlm_models import observation

from vlarl.decisions import Row, TensorRows
from vlarl.policies.vlm.decisions import TextSample, text_decisions
from vlarl.policies.vlm.inputs import Ragged, VlmInputs
from vlarl.training.batch import build_batch
from vlarl.types import Task, Trajectory, Transition

SEEDS = range(20)


def random_rows(seed: int) -> list[torch.Tensor]:
    """The entries of each row: 0 to 4 of them, in some batches of no row; [C] as patches or [2, 3] as images."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, rng.integers(0, 6)) * (seed % 5 != 0)  # in some batches no row has any
    shape = (3,) if seed % 2 else (2, 3)
    return [torch.from_numpy(rng.normal(size=(count, *shape))) for count in counts]


def joined(rows: list[torch.Tensor], shape: tuple[int, ...] = (3,)) -> Ragged:
    values = torch.cat(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)
    return Ragged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def check(found: Ragged, rows: list[torch.Tensor]) -> None:
    """The batch has these rows, by all that reads one: entries, padded rows, and parts."""
    assert len(found) == len(rows) and found.counts.tolist() == [len(row) for row in rows]
    assert len(found.values) == sum(map(len, rows))
    padded = found.padded()
    assert padded.shape[:2] == (len(rows), max(map(len, rows), default=0))
    parts = split(found)
    for own, part, row in zip(padded, parts, rows, strict=True):
        assert torch.equal(own[: len(row)], row) and not own[len(row) :].any()
        assert torch.equal(part.values, row) and part.counts.tolist() == [len(row)]


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_come_back_from_every_order_and_every_way_to_cut(seed):
    rows = random_rows(seed)
    shape = tuple(rows[0].shape[1:]) if rows else (3,)
    ragged = joined(rows, shape)
    check(ragged, rows)
    rng = np.random.default_rng(seed)
    if rows:
        chosen = rng.integers(0, len(rows), 7)  # some twice, some not at all
        check(ragged.rows(torch.from_numpy(chosen)), [rows[index] for index in chosen])
        check(Ragged.cat(split(ragged)), rows)
    is_chosen = rng.random(len(rows)) < 0.5
    check(ragged.rows(torch.from_numpy(is_chosen)), [row for row, taken in zip(rows, is_chosen, strict=True) if taken])
    for cut in (
        slice(1, 3),
        slice(2, None),
        slice(-2, None),
        slice(0, 99),
        slice(3, 1),
        slice(0, 0),
        slice(0, None, 2),
    ):
        check(ragged.rows(cut), rows[cut])
    check(Ragged.cat([ragged.rows(slice(0, 2)), ragged.rows(slice(2, None))]), rows)
    check(ragged.empty(), [])
    check(ragged.empty_rows(3), [torch.zeros(0, *shape, dtype=torch.float64)] * 3)
    for same in (pickle.loads(pickle.dumps(ragged)), ragged.to("cpu"), ragged.map(torch.clone)):
        check(same, rows)


def test_a_row_is_pickled_without_the_others():
    whole = joined([torch.ones(2, 3), torch.full((1000, 3), 2.0)])
    content = pickle.dumps(Row(whole, 0))
    assert torch.equal(pickle.loads(content).alone().values, torch.ones(2, 3)) and len(content) < 1000


def test_a_batch_that_begins_with_ragged_rows_has_as_many_rows():
    @dataclass(frozen=True)
    class Seen(TensorRows):
        patches: Ragged
        ids: torch.Tensor

    seen = Seen(joined([torch.ones(2, 3), torch.ones(1, 3)]), torch.tensor([[1], [2]]))
    assert len(seen) == 2 and [part.ids.tolist() for part in split(seen)] == [[[1]], [[2]]]
    other = replace(seen, patches=joined([torch.ones(1, 3), torch.ones(2, 3)]))
    assert seen.shape_key != other.shape_key, "as many entries, in other rows"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_with_and_without_images_come_back(shared, kind, seed):
    """Of both kinds of families: patches of all images end to end, and a row of images for each prompt."""
    counts = np.random.default_rng(seed).integers(0, 3, 5)
    policy = shared(kind)
    alone = [policy.process([observation("x" * i, int(count), i)]) for i, count in enumerate(counts)]
    whole = VlmInputs.cat(alone)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(5))
    for found, wanted in (
        (split(whole), alone),
        (split(whole.rows(order)), [alone[index] for index in order]),
        (split(VlmInputs.cat(split(whole))), alone),
        (split(pickle.loads(pickle.dumps(whole))), alone),
    ):
        for row, one in zip(found, wanted, strict=True):
            for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
                own, given = getattr(row, name), getattr(one, name)
                if given is None:
                    assert own is None or own.counts.tolist() == [0] and not len(own.values)
                else:
                    assert torch.equal(own.values, given.values) and torch.equal(own.counts, given.counts)
            assert torch.equal(row.ids, one.ids)


def decided(inputs: VlmInputs) -> Trajectory:
    sample = TextSample(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]), torch.tensor([True]))
    seen = observation("?")
    step = Transition(
        seen, Row(inputs, 0), Row(text_decisions(sample, torch.zeros(1, 2)), 0), np.zeros(1, np.float32), 1, "a"
    )
    return Trajectory(Task("prompts", 0, 0, 0), (step,), seen, True, False, True, 0)


def num_bytes(rows: TensorRows) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in rows.tensors())


def test_a_batch_of_the_learner_takes_the_memory_of_its_rows():
    """One large image among 31 small ones: they are not padded to it."""
    rows = [
        VlmInputs(
            ids=torch.ones(1, 4, dtype=torch.int64),
            attention_mask=torch.ones(1, 4, dtype=torch.bool),
            pixel_values=Ragged(torch.ones(patches, 1176), torch.tensor([patches])),
            image_grid_thw=Ragged(torch.tensor([[1, 8, patches // 8]]), torch.tensor([1])),
        )
        for patches in [*[64] * 31, 4096]
    ]
    batch = build_batch([decided(row) for row in rows]).to("cpu")
    assert num_bytes(batch.inputs) == sum(map(num_bytes, rows)) < 28 * 2**20
    assert batch.inputs.rows(slice(0, 31)).pixel_values.padded().shape == (31, 64, 1176)
