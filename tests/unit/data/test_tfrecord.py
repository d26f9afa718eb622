"""TFRecord framing: known checksums, round trips, and damage that is named."""

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlarl.data.rlds.tfrecord import MASK_DELTA, TFRecordFile, masked_crc, write_record
from vlarl.errors import UsageError


def by_the_bit(data: bytes) -> int:
    """CRC-32C as its definition has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def unmasked(masked: int) -> int:
    """The checksum itself: TensorFlow rotates it by 15 bits and adds a constant."""
    rotated = (masked - MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the usual check value
        (b"123456789", 0xE3069283),
        (b"\x00" * 32, 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_known_checksums(data, crc):
    assert unmasked(masked_crc(data)) == crc == by_the_bit(data)


def written(tmp_path: Path, records: list[bytes]) -> Path:
    file = io.BytesIO()
    for record in records:
        write_record(file, record)
    path = tmp_path / "shard"
    path.write_bytes(file.getvalue())
    return path


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=2000), max_size=5))
def test_what_is_written_is_read(tmp_path_factory, records):
    file = TFRecordFile(written(tmp_path_factory.mktemp("tfrecord"), records))
    assert [bytes(file.record(i)) for i in range(len(file))] == records


def test_every_damaged_byte_is_noticed(tmp_path):
    """Three records; one byte after the other is changed, and reading everything must fail and say where."""
    records = [b"one", b"second", b"3"]
    path = written(tmp_path, records)
    whole = path.read_bytes()
    starts = [0, 12 + 3 + 4, 2 * (12 + 4) + 3 + 6]
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        record = sum(place >= start for start in starts) - 1
        with pytest.raises(UsageError, match=rf"shard: record {record} at byte {starts[record]} is damaged"):
            [TFRecordFile(path).record(i) for i in range(3)]


def test_a_file_that_was_cut_off_says_where_and_by_how_much(tmp_path):
    path = written(tmp_path, [b"x" * 100, b"y" * 3000])
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(UsageError, match=r"record 1 at byte 116 is damaged \(the file ends 50 bytes too early\): copy"):
        TFRecordFile(path).record(1)
    path.write_bytes(whole[:120])
    with pytest.raises(UsageError, match=r"record 1 at byte 116 is damaged \(the file ends within its header\)"):
        TFRecordFile(path).record(1)
    assert bytes(TFRecordFile(path).record(0)) == b"x" * 100, "what is before the damage can be read"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nothing can't be read \(No such file or directory\)"):
        TFRecordFile(tmp_path / "nothing")


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "empty").touch()
    assert len(TFRecordFile(tmp_path / "empty")) == 0
