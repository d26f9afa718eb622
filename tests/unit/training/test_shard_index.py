"""The index of a checkpoint in parts is a pickle: what is in it is made, what it would call is not."""

import io
import os
import pickle
import warnings
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from vlarl.training.ranks import SingleRank
from vlarl.training.shard_index import read_index
from vlarl.training.shards import read_shards, stored_shapes, write_shards

TENSORS = {
    "weights.a": torch.arange(6.0).reshape(2, 3),
    "weights.b": torch.ones(2, dtype=torch.bfloat16),
    "optimizer.a.step": torch.tensor(3.0),
    "random.cpu": torch.arange(5, dtype=torch.uint8),
}


class Command:
    """Pickled, it is a call of `function` when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def checkpoint(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_shards(TENSORS, tmp_path)
    return tmp_path


def index_of(checkpoint) -> Metadata:
    with (checkpoint / "sharded" / ".metadata").open("rb") as file:
        return read_index(file)


def test_what_was_written_is_read(checkpoint):
    assert stored_shapes(checkpoint) == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_shards(read, checkpoint, SingleRank())
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("function", [os.mkdir, torch.load, getattr, eval, __import__])
def test_an_index_that_calls_something_is_refused_by_its_name(checkpoint, function):
    trap = checkpoint / "trap"
    (checkpoint / "sharded" / ".metadata").write_bytes(pickle.dumps(Command(function, str(trap))))
    with pytest.raises(OSError, match=rf"it would call \w+(\.\w+)*\.{function.__name__}"):
        stored_shapes(checkpoint)
    with pytest.raises(OSError, match="it would call"):
        read_shards({"weights.a": torch.zeros(2, 3)}, checkpoint, SingleRank())
    assert not trap.exists()


def test_a_call_deep_inside_the_index_is_refused(checkpoint):
    index = index_of(checkpoint)
    index.planner_data = {"x": [Command(os.mkdir, str(checkpoint / "trap"))]}
    (checkpoint / "sharded" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(OSError, match="it would call"):
        stored_shapes(checkpoint)
    assert not (checkpoint / "trap").exists()


def test_an_object_that_the_library_would_load_as_a_pickle_is_refused(checkpoint):
    """torch.distributed.checkpoint loads stored bytes with weights_only=False."""
    index = index_of(checkpoint)
    index.state_dict_metadata["weights.a"] = BytesStorageMetadata()
    with pytest.raises(pickle.UnpicklingError, match="BytesStorageMetadata"):
        read_index(io.BytesIO(pickle.dumps(index)))
    index.state_dict_metadata["weights.a"] = "something else"
    with pytest.raises(pickle.UnpicklingError, match="'weights.a' is not a tensor"):
        read_index(io.BytesIO(pickle.dumps(index)))


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


def setting(target: type, name: str, value: bytes, slots: bool = True) -> bytes:
    """A prefix of a pickle that sets an attribute of a class, and leaves nothing on the stack."""
    names = pickle.EMPTY_DICT + pickle.MARK + text(name) + value + pickle.SETITEMS
    state = pickle.NONE + names + pickle.TUPLE2 if slots else names
    return f"c{target.__module__}\n{target.__name__}\n".encode() + state + pickle.BUILD + pickle.POP


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [(PosixPath, "is_file", b"ccollections\nOrderedDict\n"), (MetadataIndex, "__module__", text("this"))],
)
def test_an_index_that_would_change_a_class_is_refused(checkpoint, monkeypatch, target, name, value):
    """The change would hold for the whole process: another __module__ is imported when a plan is pickled."""
    file = checkpoint / "sharded" / ".metadata"
    file.write_bytes(setting(target, name, value) + file.read_bytes())
    before = getattr(target, name)
    monkeypatch.setattr(target, name, before)  # is put back if it is changed
    with pytest.raises(OSError, match=f"it would change {target.__name__}, which is not a record"):
        stored_shapes(checkpoint)
    assert getattr(target, name) is before


@pytest.mark.parametrize("name", ["__reduce_ex__", "__setstate__", "other"])
def test_an_index_that_would_set_more_than_the_fields_of_a_record_is_refused(checkpoint, name):
    fields = pickle.dumps(vars(index_of(checkpoint)) | {name: 1})[2:-1]  # without PROTO and STOP
    made = f"c{Metadata.__module__}\nMetadata\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    with pytest.raises(pickle.UnpicklingError, match="it would set more than the fields of a Metadata"):
        read_index(io.BytesIO(pickle.PROTO + b"\x04" + made + fields + pickle.BUILD + pickle.STOP))


def test_an_index_of_another_python_is_read(checkpoint):
    """Python 3.13 has its paths in pathlib._local, which no other version has."""
    index = index_of(checkpoint)
    index.storage_meta.checkpoint_id = PosixPath("a")
    content = pickle.dumps(index, protocol=2)
    assert content.count(b"cpathlib\nPosixPath\n") == 1
    read = read_index(io.BytesIO(content.replace(b"cpathlib\n", b"cpathlib._local\n")))
    assert read.storage_meta.checkpoint_id == PosixPath("a")


def test_a_file_outside_the_folder_is_refused(checkpoint):
    index = index_of(checkpoint)
    next(iter(index.storage_data.values())).relative_path = "../other.distcp"
    with pytest.raises(pickle.UnpicklingError, match="is not in its folder"):
        read_index(io.BytesIO(pickle.dumps(index)))


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff", b"b.", b"T\0", b"h\1.", pickle.dumps({"a": 1}), pickle.dumps([1])[:-3]]
)
def test_garbage_is_damage(checkpoint, content):
    (checkpoint / "sharded" / ".metadata").write_bytes(content)
    with pytest.raises(OSError, match="can't be read"):
        stored_shapes(checkpoint)
