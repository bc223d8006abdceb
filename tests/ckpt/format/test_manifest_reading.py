"""A manifest is believed only after all it says was checked, and old ones are still read."""

import json

import pytest
import xxhash

from megablocks_core.ckpt.format.manifest_reading import parse_manifest, read_manifest
from megablocks_core.ckpt.manifest import CheckpointError, Chunk, FileRecord, Manifest, StoredAs
from megablocks_core.ckpt.places.local_place import LocalPlace


def _signed(body):
    """A manifest of any content, with a hash that is right."""
    head = json.dumps(body, indent=1).removesuffix("\n}")
    return f'{head},\n "xxh3_128": "{xxhash.xxh3_128_hexdigest(head.encode())}"\n}}\n'.encode()


def _body():
    return {
        "format": "megablocks_core.ckpt",
        "version": 2,
        "saved_unix_ns": 7,
        "state": {"a": {"kind": "module"}, "step": {"kind": "json", "value": 3}},
        "tensors": {
            "a/x": {
                "dtype": "F32",
                "shape": [4, 2],
                "chunks": [["f", 64, [0, 0], [1, 2]], ["f", 72, [1, 0], [3, 2]]],
            },
            "a/y": {"dtype": "U8", "shape": [], "chunks": [["f", 96, [], []]]},
        },
        "files": {"f": {"size": 97, "xxh3_128": ["0" * 32]}},
    }


def test_round_trip(tmp_path):
    manifest = Manifest(
        7,
        {
            "a": {"kind": "tensor"},
            "step": {"kind": "json", "value": [2**70, 0.1, "\N{SNOWMAN}", ',\n "xxh3_128": "']},
        },
        {"a/a": StoredAs("F32", (2,), [Chunk("f", 8, (0,), (1,)), Chunk("f", 12, (1,), (1,))])},
        {"f": FileRecord(16, ["00"])},
    )
    (tmp_path / "manifest.json").write_text(manifest.text())
    assert read_manifest(LocalPlace(tmp_path)) == manifest


def test_tensors_can_be_left_out():
    whole, rest = (parse_manifest(_signed(_body()), "m", tensors=tensors) for tensors in (1, 0))
    assert whole.tensors and not rest.tensors
    assert (rest.files, rest.state, rest.digest) == (whole.files, whole.state, whole.digest)


def test_version_1_is_read():
    body = _body() | {"version": 1}
    whole = {"file": "f", "offset": 64, "length": 32}
    body["tensors"] = {"a/x": {"dtype": "F32", "shape": [4, 2], "chunks": [whole]}}
    stored = parse_manifest(_signed(body), "m").tensors["a/x"]
    assert stored == StoredAs("F32", (4, 2), [Chunk("f", 64, (0, 0), (4, 2))])


@pytest.mark.parametrize(("key", "value"), [("version", 3), ("version", None), ("format", "x")])
def test_another_format_is_named(key, value):
    with pytest.raises(CheckpointError, match=f"m has format.*{value}.* reads .* versions 1 and 2"):
        parse_manifest(_signed(_body() | {key: value}), "m")


def _set(body, path, value):
    *above, last = path
    for key in above:
        body = body[key]
    body[last] = value


_CHUNKS = ("tensors", "a/x", "chunks")
_HOSTILE = [
    (("saved_unix_ns",), -1, "saved_unix_ns is -1"),
    (("saved_unix_ns",), True, "saved_unix_ns is True"),
    (("state",), [], "state is"),
    (("state", "a"), {"kind": "pickle"}, r"state\['a'\] is"),
    (("state", "step"), {"kind": "json"}, "has no value"),
    *(
        (("state", "a"), {"kind": "optimizer", "value": value}, "is no optimizer's")
        for value in (
            5,
            {},
            {"param_groups": {}, "state": {}},
            {"param_groups": [1], "state": {}},
            {"param_groups": [{"names": "ab", "values": {}}], "state": {}},
            {"param_groups": [{"names": [1], "values": {}}], "state": {}},
            {"param_groups": [{"names": ["a"], "values": 1}], "state": {}},
            {"param_groups": [], "state": []},
            {"param_groups": [], "state": {"a/x": 1}},
        )
    ),
    (("state", "../up"), {"kind": "module"}, "'../up' is no name of an entry"),
    (("state", ""), {"kind": "module"}, "'' is no name of an entry"),
    (("tensors",), None, "tensors is"),
    (("state", "a"), {"kind": "json", "value": 1}, "'a/x' is a tensor of an entry of the kind"),
    (("state", "a"), {"kind": "tensor"}, "'a/x' must be a/a"),
    (("state", "b"), {"kind": "tensor"}, "b/b is missing"),
    (("tensors", "a/x", "shape"), [0, 2**40, 2**40], "has the shape"),
    (("tensors", "a/x", "shape"), [1] * 65, "has the shape"),
    (("tensors", "a/x"), 5, "is 5"),
    (("tensors", "a/x", "dtype"), "F33", "has the dtype 'F33'"),
    (("tensors", "a/x", "dtype"), ["F32"], "has the dtype"),
    (("tensors", "a/x", "dtype"), "F64", "lies outside the files"),
    (("tensors", "a/x", "shape"), [4, 2.0], "the shape of"),
    (("tensors", "a/x", "shape"), [-4, -2], "the shape of"),
    (("tensors", "a/x", "shape"), [2**62, 2**62], "has the shape"),
    (("tensors", "a/x", "shape"), [8], "is not in"),
    (("tensors", "a/x", "shape"), [5, 2], "hold 8 elements"),
    (("tensors", "a/x", "shape"), "42", "the shape of"),
    (_CHUNKS, {}, "is"),
    (_CHUNKS, [], "hold 0 elements"),
    ((*_CHUNKS, 0), ["f", 64, [0, 0]], "a chunk of"),
    ((*_CHUNKS, 0), [["f"], 64, [0, 0], [1, 2]], "a chunk of"),
    ((*_CHUNKS, 0), {"file": "f", "offset": 64}, "hold 14 elements"),
    ((*_CHUNKS, 0), ["g", 64, [0, 0], [1, 2]], "lies outside the files"),
    ((*_CHUNKS, 0, 1), 2**62, "lies outside the files"),
    ((*_CHUNKS, 0, 1), -8, "the offset of"),
    ((*_CHUNKS, 0, 1), "64", "the offset of"),
    ((*_CHUNKS, 0, 1), 68, "overlap in 'f'"),
    ((*_CHUNKS, 0, 1), 62, "begins within an element"),
    (("tensors", "a/y", "chunks", 0, 1), 95, "overlap in 'f'"),
    ((*_CHUNKS, 0, 2), [4, 0], "is not in"),
    ((*_CHUNKS, 0, 2), [1, 0], "chunks of 'a/x' overlap"),
    ((*_CHUNKS, 0, 3), [2**40, 2**40], "is not in"),
    (("files",), [], "files is"),
    (("files", "f"), None, "is None"),
    (("files", "f", "size"), 10**30, "the size of"),
    (("files", "f", "size"), 2**62, "has the hashes"),
    (("files", "f", "size"), 96, "lies outside the files"),
    (("files", "f", "xxh3_128"), "0" * 32, "has the hashes"),
    (("files", "f", "xxh3_128"), [0], "has the hashes"),
]


@pytest.mark.parametrize(("path", "value", "message"), _HOSTILE)
def test_what_cannot_be_is_refused(path, value, message):
    parse_manifest(_signed(_body()), "m")
    body = _body()
    _set(body, path, value)
    with pytest.raises(CheckpointError, match=f"m says what cannot be: .*{message}"):
        parse_manifest(_signed(body), "m")


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "a\0",
        "manifest.json",
        "\ud800",
        "a" * 256,
    ],
)
def test_files_outside_the_folder_are_refused(name):
    body = _body()
    body["files"][name] = {"size": 1, "xxh3_128": ["0"]}
    with pytest.raises(CheckpointError, match="is no name of a file in its folder"):
        parse_manifest(_signed(body), "m")


def test_a_key_that_stands_twice_is_refused():
    text = _signed(_body()).decode().replace('"a/y"', '"a/x"')
    head = text.rpartition(',\n "xxh3_128"')[0]
    text = f'{head},\n "xxh3_128": "{xxhash.xxh3_128_hexdigest(head.encode())}"\n}}\n'
    with pytest.raises(CheckpointError, match="'a/x' stands twice"):
        parse_manifest(text.encode(), "m")


def test_a_manifest_that_is_too_long_is_not_read(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, more than"):
        read_manifest(LocalPlace(tmp_path))


def test_many_chunks_are_checked_at_once():
    body, rows = _body(), 100
    chunks = [["f", 8 * row, [row, 0], [1, 2]] for row in range(rows)]
    body["tensors"] = {"a/x": {"dtype": "F32", "shape": [rows, 2], "chunks": chunks}}
    body["files"] = {"f": {"size": 8 * rows, "xxh3_128": ["0" * 32]}}
    parse_manifest(_signed(body), "m")
    chunks[7][2] = [6, 0]
    with pytest.raises(CheckpointError, match="chunks of 'a/x' overlap"):
        parse_manifest(_signed(body), "m")


@pytest.mark.parametrize("text", ["[" * 10**5, "{", "null", "[1]", '"\N{SNOWMAN}"', ""])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(CheckpointError, match="m is damaged"):
        parse_manifest(text.encode(), "m")
    head = text.removesuffix("\n}")
    tail = f',\n "xxh3_128": "{xxhash.xxh3_128_hexdigest(head.encode())}"\n}}\n'
    with pytest.raises(CheckpointError, match="m is not JSON"):
        parse_manifest((head + tail).encode(), "m")
