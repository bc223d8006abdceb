"""Shards of mosaicml-streaming: as that library writes them, and as it reads them."""

import gzip
import hashlib
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megablocks_core.data.convert import convert
from megablocks_core.data.convert.mds import MDSFolder, compression_level
from megablocks_core.data.convert.mds_samples import shard_of

from .conftest import contents, documents, some_documents, write


def save(folder, samples, encodings, sizes=None, **said):
    """A folder of one plain shard, of samples that are made already."""
    folder.mkdir()
    data = shard_of(samples, b"{}")
    (folder / "shard.00000.mds").write_bytes(data)
    raw = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}
    shard = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": None,
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": sizes or [None] * len(encodings),
        "raw_data": raw,
        "zip_data": None,
        "samples": len(samples),
        **said,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return f"mds:{folder}"


def mosaic():
    """mosaicml-streaming, which imports torchvision for its image datasets alone."""
    if find_spec("streaming") is None:
        pytest.skip("could not import 'streaming': oracle streaming")
    import_module("transformers")  # it looks for torchvision too, and must not find this one
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module: Any = ModuleType(f"torchvision{name}")
            module.VisionDataset, module.to_tensor = object, None
            module.functional = module.transforms = module.datasets = module
            patch.setitem(sys.modules, module.__name__, module)
        return import_module("streaming")


def sized(*values):
    return b"".join(len(value).to_bytes(4, "little") for value in values) + b"".join(values)


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "float64"])
def test_a_round_trip_has_the_same_bytes(tmp_path, compression, dtype):
    prefix = write(tmp_path / "x", [[], *some_documents(most=30_000), []], dtype)
    report = convert(prefix, f"mds:{tmp_path / 'm'}", shard_bytes=20_000, compression=compression)
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    end = ".zstd" if compression else ""
    names = [f"shard.{index:05}.mds{end}" for index in range(report.files)]
    assert files == ["index.json", *names]
    assert report.files > 5
    convert(f"mds:{tmp_path / 'm'}", tmp_path / "y")
    assert contents(tmp_path / "y") == contents(prefix)


def test_no_shard_is_longer_than_asked_for(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3]] * 60)
    for limit in range(600, 640, 3):
        report = convert(prefix, f"mds:{tmp_path / str(limit)}", shard_bytes=limit)
        sizes = [path.stat().st_size for path in (tmp_path / str(limit)).glob("*.mds")]
        assert limit - 20 < sorted(sizes)[1] <= max(sizes) <= limit
        assert report.files == len(sizes) > 2


def test_every_changed_byte_of_a_shard_is_told(tmp_path):
    convert(write(tmp_path / "x", some_documents(20)), f"mds:{tmp_path / 'm'}")
    path = tmp_path / "m" / "shard.00000.mds"
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"shard\.00000\.mds: has the sha1 \w+, must have"):
            convert(f"mds:{tmp_path / 'm'}", tmp_path / "y")
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"holds {len(whole) - 1} bytes, must hold {len(whole)}"):
        convert(f"mds:{tmp_path / 'm'}", tmp_path / "y")
    path.unlink()
    with pytest.raises(ValueError, match=r"shard\.00000\.mds is missing"):
        convert(f"mds:{tmp_path / 'm'}", tmp_path / "y")
    assert not list(tmp_path.glob("y*"))


@pytest.mark.parametrize("kind", ["gz", "bz2", "zstd", "snappy"])
def test_compressed_shards_are_read_and_never_past_their_size(tmp_path, kind):
    import bz2

    import zstandard

    source = tmp_path / "m"
    convert(write(tmp_path / "x", some_documents(20)), f"mds:{source}")
    plain = source / "shard.00000.mds"
    data = plain.read_bytes()
    packed = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zstd": zstandard.ZstdCompressor().compress,
        "snappy": bytes,
    }[kind]
    index = json.loads((source / "index.json").read_text())
    zipped = {"basename": "z", "bytes": len(packed(data)), "hashes": {}}
    index["shards"][0].update(compression=kind, zip_data=zipped)
    (source / "index.json").write_text(json.dumps(index))
    plain.unlink()
    (source / "z").write_bytes(packed(data))
    if kind == "snappy":
        with pytest.raises(ValueError, match="compression 'snappy' must be zstd, gz or bz2"):
            convert(f"mds:{source}", tmp_path / "y")
        return
    convert(f"mds:{source}", tmp_path / "y")
    assert contents(tmp_path / "y") == contents(tmp_path / "x")
    for bad, told in (
        (packed(bytes(1 << 24)), rf"z: holds {len(data) + 1} bytes, must hold {len(data)}"),
        (packed(data)[:-20], r"z: (cannot be decompressed|holds \d+ bytes|has the sha1)"),
        (b"no such thing", r"z: cannot be decompressed"),
    ):
        index["shards"][0]["zip_data"]["bytes"] = len(bad)
        (source / "index.json").write_text(json.dumps(index))
        (source / "z").write_bytes(bad)
        with pytest.raises(ValueError, match=told):
            convert(f"mds:{source}", tmp_path / "w")


def test_bytes_are_ids_of_the_dtype_that_is_given(tmp_path):
    rows = [np.array([1, 2, 3]), np.array([2**40])]
    samples = [sized(b"a", row.tobytes()) for row in rows]
    source = save(tmp_path / "m", samples, {"id": "str", "tokens": "bytes"})
    with pytest.raises(ValueError, match="source_dtype must be given: column 'tokens' is bytes"):
        convert(source, tmp_path / "x")
    convert(source, tmp_path / "x", source_dtype="int64")
    assert documents(tmp_path / "x") == [row.tolist() for row in rows]
    bad = save(tmp_path / "n", [sized(b"abc")], {"tokens": "bytes"})
    with pytest.raises(ValueError, match="a sample of 3 bytes, no whole number of tokens"):
        convert(bad, tmp_path / "y", source_dtype="int64")


def test_texts_and_named_columns(tmp_path):
    samples = [sized(b"one", "naïve".encode()), sized(b"two", b"")]
    source = save(tmp_path / "m", samples, {"mine": "str", "text": "str"})
    report = convert(source, tmp_path / "x", tokenizer="bytes")
    assert (documents(tmp_path / "x"), report.empty) == ([list("naïve".encode())], 1)
    convert(source, tmp_path / "y", tokenizer="bytes", column="mine")
    assert documents(tmp_path / "y") == [list(b"one"), list(b"two")]
    bad = save(tmp_path / "n", [sized(b"\xff")], {"text": "str"})
    with pytest.raises(ValueError, match="column 'text' is not UTF-8"):
        convert(bad, tmp_path / "z", tokenizer="bytes")


def test_columns_that_hold_no_ids_are_refused_and_pickles_never_opened(tmp_path):
    for number, (name, kind, told) in enumerate(
        (
            ("tokens", "pkl", "column 'tokens' is pkl, must be ndarray, bytes or str"),
            ("tokens", "ndarray:float16", "must be ndarray, bytes or str"),
            ("label", "int", r"has the columns \['label'\], must have tokens or input_ids or text"),
        )
    ):
        source = save(tmp_path / f"m{number}", [sized(b"x")], {name: kind})
        with pytest.raises(ValueError, match=told):
            convert(source, tmp_path / "x")
    two = save(tmp_path / "two", [sized(b"\x08\1\1a")], {"tokens": "ndarray:uint8"})
    with pytest.raises(ValueError, match=r"an array of shape \[1, 1\], must be one row"):
        convert(two, tmp_path / "x")


def test_an_index_that_is_none_is_refused(tmp_path):
    folder = tmp_path / "m"
    save(folder, [sized(b"\4\1a")], {"tokens": "ndarray:uint8"})
    whole = json.loads((folder / "index.json").read_text())
    shard = whole["shards"][0]
    for index, told in (
        ({}, "must be of version 2, with shards"),
        ({"version": 2, "shards": []}, "must be of version 2, with shards"),
        ({"version": 2, "shards": [5]}, "does not describe its shards"),
        ({"version": 2, "shards": [{**shard, "samples": "1"}]}, "does not describe its shards"),
        ({"version": 2, "shards": [{**shard, "column_sizes": []}]}, "does not describe its shards"),
        (
            {"version": 2, "shards": [{**shard, "raw_data": {"basename": "shard.00000.mds"}}]},
            "does not describe its shards",
        ),
        ({"version": 2, "shards": [{**shard, "format": "csv"}]}, "must be of version 2 of mds"),
        (
            {"version": 2, "shards": [{**shard, "raw_data": {"basename": "../a", "bytes": 1}}]},
            "must be a file beside it",
        ),
        (
            {"version": 2, "shards": [shard, {**shard, "column_encodings": ["ndarray:int8"]}]},
            "must have one kind of column",
        ),
    ):
        (folder / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=told):
            MDSFolder(folder, None, None)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"index\.json is missing"):
        MDSFolder(folder, None, None)


@pytest.mark.parametrize("compression", ["zst", "zstd:0", "zstd:23", "zstd:x", "gz", ""])
def test_compressions_that_are_none_are_refused(tmp_path, compression):
    with pytest.raises(ValueError, match="must be zstd or zstd:LEVEL, 1 to 22"):
        compression_level(compression)
    assert [compression_level(one) for one in (None, "zstd", "zstd:19")] == [None, 3, 19]


def test_hashes_are_those_of_the_files(tmp_path):
    convert(write(tmp_path / "x", [[1]]), f"mds:{tmp_path / 'm'}", compression="zstd")
    shard = json.loads((tmp_path / "m" / "index.json").read_text())["shards"][0]
    data = (tmp_path / "m" / shard["zip_data"]["basename"]).read_bytes()
    assert shard["zip_data"]["hashes"]["sha1"] == hashlib.sha1(data).hexdigest()
    assert shard["hashes"] == ["sha1", "xxh64"]


def test_the_library_reads_what_is_written(tmp_path):
    streaming = mosaic()
    rows = [[], *some_documents(60)]
    prefix = write(tmp_path / "x", rows)
    for compression in (None, "zstd:3"):
        folder = tmp_path / f"m{compression}"
        convert(prefix, f"mds:{folder}", shard_bytes=9_000, compression=compression)
        index = json.loads((folder / "index.json").read_text())
        readers = [
            streaming.base.format.reader_from_json(str(folder), None, shard)
            for shard in index["shards"]
        ]
        for reader, shard in zip(readers, index["shards"], strict=True):
            if compression:
                decompress = streaming.base.compression.decompress
                zipped = (folder / shard["zip_data"]["basename"]).read_bytes()
                plain = folder / shard["raw_data"]["basename"]
                plain.write_bytes(decompress(compression, zipped))
            for kind, value in shard["raw_data"]["hashes"].items():
                data = (folder / shard["raw_data"]["basename"]).read_bytes()
                assert streaming.base.hashing.get_hash(kind, data) == value
            reader.validate(False)
        found = [reader[at]["tokens"] for reader in readers for at in range(reader.samples)]
        assert [document.tolist() for document in found] == rows
        assert {document.dtype for document in found} == {np.dtype("u2")}


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_plain_shards_are_those_of_the_library_byte_for_byte(tmp_path, dtype):
    streaming = mosaic()
    rows = some_documents(80, most=30_000)
    convert(write(tmp_path / "x", rows, dtype), f"mds:{tmp_path / 'm'}", shard_bytes=9_000)
    with streaming.MDSWriter(
        out=str(tmp_path / "theirs"),
        columns={"tokens": f"ndarray:{dtype}"},
        hashes=["sha1", "xxh64"],
        size_limit=9_000,
    ) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row, dtype)})
    ours, theirs = (sorted((tmp_path / name).iterdir()) for name in ("m", "theirs"))
    assert [path.name for path in ours] == [path.name for path in theirs]
    for one, other in zip(ours, theirs, strict=True):
        if one.name == "index.json":
            assert json.loads(one.read_text()) == json.loads(other.read_text())
        else:
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("compression", [None, "zstd:1", "gz"])
@pytest.mark.parametrize("kind", ["ndarray", "ndarray:int32", "ndarray:int32:7", "bytes", "str"])
def test_what_the_library_writes_is_read(tmp_path, compression, kind):
    streaming = mosaic()
    draw = np.random.default_rng(0)
    fixed = kind.endswith(":7")
    rows = [
        draw.integers(32, 120, 7 if fixed else draw.integers(1, 400)).astype(np.int32)
        for _ in range(50)
    ]
    make = {"bytes": np.ndarray.tobytes, "str": lambda row: bytes(row.tolist()).decode()}
    with streaming.MDSWriter(
        out=str(tmp_path / "m"),
        columns={"after": "str", "tokens" if kind != "str" else "text": kind, "z": "int"},
        hashes=["sha1", "xxh3_64"],
        compression=compression,
        size_limit=4_000,
    ) as writer:
        for row in rows:
            value = make.get(kind, np.asarray)(row)
            name = "tokens" if kind != "str" else "text"
            writer.write({"after": "xyz", name: value, "z": 5})
    options = {"bytes": {"source_dtype": "int32"}, "str": {"tokenizer": "bytes"}}.get(kind, {})
    report = convert(f"mds:{tmp_path / 'm'}", tmp_path / "x", **options)
    assert documents(tmp_path / "x") == [row.tolist() for row in rows]
    assert report.dtype == ("uint16" if kind == "str" else "int32")
