"""What checksums.json says of the files beside it."""

import pytest

from vlarl.policies.checksums import FILE_NAME, checksums, verify_checksums, write_checksums


def everything(name: str) -> bool:
    return True


@pytest.fixture
def folder(tmp_path):
    for name in ("model.safetensors", "value_head.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    write_checksums(tmp_path, checksums(tmp_path, everything))
    return tmp_path


def test_files_as_they_were_written_are_taken(folder):
    verify_checksums(folder, everything)


def test_a_file_that_is_listed_and_missing_is_named(folder):
    (folder / "value_head.safetensors").unlink()
    with pytest.raises(ValueError, match=f"value_head.safetensors is missing, and {FILE_NAME} lists it"):
        verify_checksums(folder, everything)
    verify_checksums(folder, lambda name: name.startswith("model"))


def test_a_flipped_bit_is_named(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is not what was written"):
        verify_checksums(folder, everything)


def test_a_file_that_a_link_brings_from_elsewhere_is_believed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("cache") / "blob"
    elsewhere.write_bytes(b"other")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(elsewhere)
    verify_checksums(folder, everything)
