"""The manifest vouches for itself, and files are hashed as they are written."""

import json

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    BlockHashes,
    CheckpointError,
    Chunk,
    FileRecord,
    Manifest,
    StoredAs,
    read_manifest,
)


def _manifest(**files):
    return Manifest(
        7,
        {"step": {"kind": "json", "value": [2**70, 0.1, "\N{SNOWMAN}", ', "xxh3_128": "']}},
        {"a/a": StoredAs("F32", [2], [Chunk("a.safetensors", 8, 8)])},
        {"a.safetensors": FileRecord(16, ["00"]), **files},
    )


def test_round_trip(tmp_path):
    manifest = _manifest()
    text = manifest.text()
    (tmp_path / "manifest.json").write_text(text)
    assert read_manifest(tmp_path) == manifest
    assert json.loads(text)["xxh3_128"] == manifest.digest
    head = text[: text.rindex(',\n "xxh3_128"')]
    assert manifest.digest == xxhash.xxh3_128_hexdigest(head.encode())


def test_another_version_is_named(tmp_path):
    text = _manifest().text().replace('"version": 1', '"version": 2')
    head = text[: text.rindex(',\n "xxh3_128"')]
    digest = xxhash.xxh3_128_hexdigest(head.encode())
    (tmp_path / "manifest.json").write_text(f'{head},\n "xxh3_128": "{digest}"\n}}\n')
    with pytest.raises(CheckpointError, match="version 2; this library reads .* version 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "..", "a/b"])
def test_files_outside_the_folder_are_refused(tmp_path, name):
    (tmp_path / "manifest.json").write_text(_manifest(**{name: FileRecord(1, ["0"])}).text())
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        read_manifest(tmp_path)


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from([0, 1, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]), max_size=4)
)
def test_blocks_do_not_depend_on_how_the_file_was_written(lengths):
    data = bytes(range(251)) * (sum(lengths) // 251 + 1)
    data = data[: sum(lengths)]
    hashes, start = BlockHashes(), 0
    for length in lengths:
        hashes.update(memoryview(data)[start : start + length])
        start += length
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    assert hashes.record() == FileRecord(len(data), [xxhash.xxh3_128_hexdigest(b) for b in blocks])
