"""Rows come out of every format with their numbers; what is none is named and the rest goes on."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.instructions import rows
from megablocks_core.data.instructions.rows import blocks, refuse_other_formats, rows_of
from megablocks_core.data.tokenize.inputs import find_inputs

ROWS = [{"text": f"row {n}", "n": n} for n in range(700)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(path, block_bytes=1 << 10, max_bytes=1 << 12):
    found, bad = [], []
    for block in blocks(find_inputs([path]), block_bytes=block_bytes, max_bytes=max_bytes):
        found += rows_of(block, max_bytes, bad)
    return found, [(one.line, one.reason) for one in bad]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson.zst", "a.json", "a.parquet"])
def test_every_format_gives_the_rows_by_number(tmp_path, name):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=300)
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS))
    else:
        compress = {
            "gz": gzip.compress,
            "zst": zstandard.ZstdCompressor().compress,
        }.get(name.rpartition(".")[2], bytes)
        path.write_bytes(compress(LINES))
    found, bad = read(path)
    assert (found, bad) == (list(enumerate(ROWS, 1)), [])
    assert len(list(blocks(find_inputs([path]), block_bytes=1 << 10, max_bytes=99))) > 1


def test_bad_lines_are_named_and_the_others_read(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode(),
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'"' + b"x" * 200_000 + b'"',
        json.dumps(ROWS[1]).encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for block_bytes in (10, 1 << 10, 1 << 20):
        found, bad = read(tmp_path / "a.jsonl", block_bytes, max_bytes=150_000)
        assert found == [(1, ROWS[0]), (7, ROWS[1])]
        assert bad == [
            (3, "is not JSON"),
            (4, "is not UTF-8"),
            (5, "is nested too deeply"),
            (6, "is longer than 150000 bytes"),
        ]


@given(st.data())
def test_blocks_of_any_size_hold_the_same_rows(tmp_path_factory, data):
    lines = data.draw(st.lists(st.sampled_from([b"1", b"22", b"", b"x" * 9, b'"abc"', b"7" * 30])))
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + data.draw(st.sampled_from([b"", b"\n"])))
    once = read(path, 1 << 20, max_bytes=12)
    assert read(path, data.draw(st.integers(1, 40)), max_bytes=12) == once


def test_long_lines_are_never_held(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * (5 << 20) + b"\n1\n")
    sizes = [
        len(block.data)
        for block in blocks(find_inputs([tmp_path / "a.jsonl"]), block_bytes=100, max_bytes=1000)
    ]
    assert max(sizes) < 1200


def test_fields_that_only_other_rows_have_are_not_there(tmp_path):
    given = [{"m": [{"role": "a", "x": 1}]}, {"m": [{"role": "b", "y": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "a.parquet")
    assert [row for _, row in read(tmp_path / "a.parquet")[0]] == [given[0], {"m": [{"role": "b"}]}]


def test_damaged_files_are_bad_rows(tmp_path):
    for name, content, bad in [
        ("a.parquet", b"nothing", (0, "is no Parquet file that can be read")),
        ("b.json", b"{}", (0, "is no JSON list of rows")),
        ("c.json", b"[1", (0, "is not JSON")),
        ("d.json", b"\xff", (0, "is not UTF-8")),
        ("e.jsonl.gz", gzip.compress(LINES)[:-9], None),
    ]:
        (tmp_path / name).write_bytes(content)
        found, faults = read(tmp_path / name)
        if bad:
            assert (found, faults) == ([], [bad])
        else:
            assert len(found) > 100
            assert faults == [(len(found) + 1, "the compressed file is cut short")]


def test_a_row_of_a_list_that_is_nested_too_deeply_is_one_bad_row(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('[1, [[2]], "\\ud800", [[3]], 5, [[6]]]')
    dumps = json.dumps

    def limited(row):
        if isinstance(row, list):
            raise RecursionError
        return dumps(row)

    monkeypatch.setattr(rows.json, "dumps", limited)
    for block_bytes in (1, 1 << 20):
        found, bad = read(tmp_path / "a.json", block_bytes)
        assert found == [(1, 1), (3, "\ud800"), (5, 5)]
        assert bad == [(line, "is nested too deeply") for line in (2, 4, 6)]


def test_files_without_rows_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a.txt: must be .jsonl"):
        refuse_other_formats(find_inputs([tmp_path / "a.txt"]))
