"""Rows by name: copied out of the object store, and never by way of the driver."""

import pickle

import pytest
import torch

from vlarl.decisions import PickedRows, Row
from vlarl.distributed import stored_rows
from vlarl.distributed.stored_rows import StoredBatch
from vlarl.errors import RowsLostError
from vlarl.policies.openvla.inputs import OpenVLAInputs


def batch(first, count):
    """Row i of it has pixels of the value first + i, and a prompt of i + 1 tokens."""
    pixels = torch.arange(first, first + count, dtype=torch.uint8).view(-1, 1, 1, 1, 1)
    mask = torch.arange(count) <= torch.arange(count)[:, None]
    return OpenVLAInputs(mask.long(), mask, pixels, None)


@pytest.fixture
def store(monkeypatch):
    """An object store of this process, and how often it was called."""
    objects, calls = {"a": batch(0, 3), "b": batch(10, 4), "c": batch(20, 2)}, []

    def fetched(names):
        calls.append(list(names))
        return [objects[name] for name in names]

    monkeypatch.setattr(stored_rows, "fetched", fetched)
    return objects, calls


def stored(name, count):
    return StoredBatch(name, count, tuple(range(1, count + 1)), "a machine")


def test_rows_are_copied_out_so_that_the_store_can_spill_and_free_them(store):
    objects, _ = store
    for index in (slice(1, 3), torch.tensor([2, 0])):
        found = stored("a", 3).rows(index)
        assert found.pixels.flatten().tolist() == torch.arange(3)[index].tolist()
        own, theirs = (tensors.untyped_storage().data_ptr() for tensors in (found.pixels, objects["a"].pixels))
        assert own != theirs


def test_the_rows_of_a_microbatch_are_fetched_side_by_side_and_joined_in_their_order(store):
    a, b, c = stored("a", 3), stored("b", 4), stored("c", 2)
    picked = PickedRows.of([Row(b, 3), Row(a, 1), Row(c, 0), Row(b, 0), Row(a, 2)])
    assert picked.lengths.tolist() == [4, 2, 1, 1, 3]
    part = picked.rows(torch.tensor([3, 1, 0]))
    assert part.to("cpu").pixels.flatten().tolist() == [10, 1, 13]
    assert [sorted(names) for names in store[1]] == [["a", "b"]], "nothing of c, and one call"


def test_what_is_read_next_is_announced(store, monkeypatch):
    announced = []
    monkeypatch.setattr(StoredBatch, "prefetch", lambda self, index: announced.append((self.reference, index.tolist())))
    a, b, c = stored("a", 3), stored("b", 4), stored("c", 2)
    picked = PickedRows.of([Row(b, 3), Row(a, 1), Row(c, 0), Row(b, 0), Row(a, 2)])
    picked.prefetch(torch.tensor([3, 4, 0]))
    assert sorted(announced) == [("a", [2]), ("b", [0, 3])] and not store[1]


def test_names_travel_and_those_that_are_not_picked_stay(store):
    a, b, c = stored("a", 3), stored("b", 4), stored("c", 2)
    picked = PickedRows.of([Row(a, 0), Row(c, 1), Row(b, 3)]).rows(slice(1, 3))
    there = pickle.loads(pickle.dumps(picked))
    assert [batch.reference for batch in there.batches] == ["c", "b"] and not store[1], "nothing was fetched"
    assert there.joined().pixels.flatten().tolist() == [21, 13]
    row = pickle.loads(pickle.dumps(Row(b, 2)))
    assert (row.batch.reference, row.index) == ("b", 2) and row.alone().pixels.flatten().tolist() == [12]


def test_a_loss_keeps_its_name_on_the_way_to_the_driver():
    error = pickle.loads(pickle.dumps(RowsLostError("gone", "00ff")))
    assert (str(error), error.name) == ("gone", "00ff")
