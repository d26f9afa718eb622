"""Rows that a rank has fetched stay with it: an object comes once, up to a limit of memory."""

import pytest
import torch

from vlarl.decisions import PickedRows, Row
from vlarl.distributed import kept_rows as module
from vlarl.distributed import stored_rows
from vlarl.distributed.kept_rows import KeptRows, kept_rows, memory_limit
from vlarl.distributed.stored_rows import StoredBatch
from vlarl.policies.openvla.inputs import OpenVLAInputs

SIZES = {"a": 3, "b": 4, "c": 2}
ROW = 100  # bytes, as the names say


def batch(first, count):
    """Row i of it has pixels of the value first + i, and a prompt of i + 1 tokens."""
    pixels = torch.arange(first, first + count, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
    mask = torch.arange(count) <= torch.arange(count)[:, None]
    return OpenVLAInputs(mask.long(), mask, pixels, None)


@pytest.fixture
def fetches(monkeypatch):
    """The names of each call to the object store; object a has the pixels 0, 1, …, b 10, 11, … and c 20, 21."""
    objects = {name: batch(10 * index, count) for index, (name, count) in enumerate(SIZES.items())}
    calls = []

    def fetched(names):
        calls.append(list(names))
        return [objects[name] for name in names]

    monkeypatch.setattr(stored_rows, "fetched", fetched)
    monkeypatch.setattr(stored_rows, "start_fetching", lambda names: None)
    return calls


def all_rows():
    """Rows 0 … 8: those of a, b and c in turn."""
    names = {
        n: StoredBatch(n, count, tuple(range(1, count + 1)), "a machine", count * ROW) for n, count in SIZES.items()
    }
    return PickedRows.of([Row(names[name], i) for name, count in SIZES.items() for i in range(count)])


EXPECTED = [0, 1, 2, 10, 11, 12, 13, 20, 21]  # pixels of rows 0 … 8


def pixels(rows, index):
    return rows.rows(torch.tensor(index)).to("cpu").pixels.flatten().tolist()


def test_each_object_is_fetched_once_whatever_the_order_of_rows(fetches):
    rows = kept_rows(all_rows(), torch.arange(9), 10**6)
    for micro in ([8, 0, 3], [1, 7, 6], [2, 5, 4], [6, 6, 0]):
        assert pixels(rows, micro) == [EXPECTED[i] for i in micro]
    assert sorted(name for call in fetches for name in call) == ["a", "b", "c"]


def test_rows_are_the_same_batch_as_without_keeping(fetches):
    kept, plain = kept_rows(all_rows(), torch.arange(9), 10**6), all_rows()
    for micro in ([8, 0, 3], [0, 7], [6]):
        one, other = (rows.rows(torch.tensor(micro)).joined() for rows in (kept, plain))
        for ours, theirs in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(ours, theirs), "prompts are as wide as the longest of the microbatch"
        assert kept.lengths.tolist() == plain.lengths.tolist()


def test_only_rows_of_this_rank_are_kept(fetches):
    """Rank 0 reads rows 0, 4 and 6: one row of a, two of b, and none of c."""
    rows = kept_rows(all_rows(), torch.tensor([6, 0, 4]), 10**6)
    assert pixels(rows, [4, 0]) == [11, 0]
    assert {which: len(kept) for which, kept in rows.keeper.kept.items()} == {0: 1, 1: 2}
    assert rows.keeper.num_bytes == 3 * ROW
    assert pixels(rows, [6]) == [13] and len(fetches) == 1
    assert pixels(rows, [5, 8]) == [12, 21], "rows of others are read, and not kept"
    assert sorted(rows.keeper.kept) == [0, 1] and len(fetches) == 2


def test_what_exceeds_the_limit_is_fetched_again(fetches):
    rows = kept_rows(all_rows(), torch.arange(9), 5 * ROW)  # a and c, and not b
    for _ in range(2):
        assert pixels(rows, [0, 3, 7]) == [0, 10, 20]
    assert [sorted(call) for call in fetches] == [["a", "b", "c"], ["b"]]
    assert rows.keeper.num_bytes == 5 * ROW


def test_only_what_is_missing_is_announced(fetches, monkeypatch):
    announced = []
    monkeypatch.setattr(module, "start_fetching", announced.append)
    rows = kept_rows(all_rows(), torch.arange(9), 10**6)
    pixels(rows, [0])
    rows.prefetch(torch.tensor([1, 8, 3]))
    assert announced == [["b", "c"]]


def test_few_objects_are_mapped_at_once(fetches, monkeypatch):
    monkeypatch.setattr(stored_rows, "MAPPED_BYTES", 7 * ROW)
    assert pixels(all_rows(), [8, 0, 3]) == [20 + 1, 0, 10]
    assert fetches == [["a", "b"], ["c"]]


def test_rows_in_memory_stay_as_they_are():
    inputs = batch(0, 3)
    assert kept_rows(inputs, torch.arange(3), 10**6) is inputs
    picked = PickedRows.of([Row(inputs, 0)])
    assert not isinstance(kept_rows(picked, torch.arange(1), 10**6), KeptRows)


def test_the_ranks_of_a_machine_keep_a_quarter_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda: 64 << 30)
    assert memory_limit(8) == 2 << 30
    monkeypatch.setattr(module, "available_memory", lambda: None)
    assert memory_limit(1) == 0, "not known: nothing is kept"
