"""The manifest is JSON, a line for each thing in it, and ends with its own hash."""

import json

import xxhash

from megablocks_core.ckpt.manifest import (
    LAST_TIME,
    Chunk,
    FileRecord,
    Manifest,
    StoredAs,
    next_time,
)


def test_the_text_is_json_with_its_own_hash_last():
    chunks = [Chunk("a", 64, (0,), (2,)), Chunk("b", 64, (2,), (1,))]
    manifest = Manifest(
        7,
        {"step": {"kind": "json", "value": [2**70, 0.1, "\N{SNOWMAN}", ', "xxh3_128": "']}},
        {"a/a": StoredAs("F32", (3,), chunks)},
        {"a": FileRecord(72, ["00"]), "b": FileRecord(68, ["11"])},
    )
    text = manifest.text()
    assert json.loads(text) == {
        "format": "megablocks_core.ckpt",
        "version": 2,
        "saved_unix_ns": 7,
        "state": manifest.state,
        "tensors": {
            "a/a": {
                "dtype": "F32",
                "shape": [3],
                "chunks": [["a", 64, [0], [2]], ["b", 64, [2], [1]]],
            }
        },
        "files": {
            "a": {"size": 72, "xxh3_128": ["00"]},
            "b": {"size": 68, "xxh3_128": ["11"]},
        },
        "xxh3_128": manifest.digest,
    }
    head = text[: text.rindex(',\n "xxh3_128"')]
    assert manifest.digest == xxhash.xxh3_128_hexdigest(head.encode())
    assert len(text.splitlines()) == 16


def test_a_chunk_is_a_box_and_a_run_of_bytes():
    chunk = Chunk("a", 100, (1, 0), (2, 3))
    assert chunk.box == (slice(1, 3), slice(0, 3))
    assert StoredAs("BF16", (4, 3), [chunk]).end_of(chunk) == 112


def test_times_rise_up_to_the_last_one():
    assert next_time(10, 3) == 10 and next_time(10, 10) == 11 and next_time(10, 70) == 71
    assert next_time(10, LAST_TIME - 1) == next_time(10, LAST_TIME) == LAST_TIME == 2**63 - 1
