"""Whatever an input holds becomes a text or a reason, at any cut into units."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.reading import Bad, UnitReader
from megablocks_core.data.tokenize.units import Held, plan

from .conftest import json_lines, some_texts, write_parquet

DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = [  # a line, and what it holds: a text, None if it is blank, or why it has none
    (b'{"text": "good"}', "good"),
    (b'{"text": ""}', ""),
    (b'{"text": "z\xc3\xbc"}', "zü"),
    (b'{"text": "a", "meta": {"deep": [1, {"x": null}]}, "unknown": NaN}', "a"),
    (b'  {"text" : "spaces"}  \r', "spaces"),
    (b"", None),
    (b"  \r", None),
    (b'{"text": "\xff\xfe"}', Bad(0, 0, "is not UTF-8")),
    (b'{"text": "cut', Bad(0, 0, "is not JSON")),
    (b"nothing", Bad(0, 0, "is not JSON")),
    (b'{"text": ' + b"9" * 5000 + b"}", Bad(0, 0, "is not JSON")),
    (b'{"text": "raw \0"}', Bad(0, 0, "is not JSON")),
    (b"\0\0\0\0", Bad(0, 0, "is not JSON")),
    (b'{"text": "escaped \\u0000"}', Bad(0, 0, "holds a NUL")),
    (b'{"text": "half \\ud800"}', Bad(0, 0, "holds half a surrogate pair")),
    (b'{"text": "both \\ud83d\\ude00"}', "both \U0001f600"),
    (DEEP, Bad(0, 0, "is nested too deeply")),
    (b'{"text": ' + DEEP + b"}", Bad(0, 0, "is nested too deeply")),
    (b'["text"]', Bad(0, 0, "is no JSON object")),
    (b'"text"', Bad(0, 0, "is no JSON object")),
    (b"3", Bad(0, 0, "is no JSON object")),
    (b"{}", Bad(0, 0, "has no 'text'")),
    (b'{"Text": "a"}', Bad(0, 0, "has no 'text'")),
    (b'{"text": null}', Bad(0, 0, "has no string for a text")),
    (b'{"text": 3}', Bad(0, 0, "has no string for a text")),
    (b'{"text": ["a"]}', Bad(0, 0, "has no string for a text")),
    (b'{"text": "' + b"x" * 300_000 + b'"}', Bad(0, 0, "is longer than 250000 bytes")),
    (b'{"text": "last"}', "last"),
]


def read_all(folder, unit_bytes, max_bytes=250_000, key="text", plain=False):
    """Texts, places and bad lines of a folder, lines counted through each file; and hashes."""
    inputs = find_inputs([folder])
    reader = UnitReader(key, max_bytes, plain=plain)
    texts, places, bad, pieces, lines, last = [], [], [], b"", 0, -1
    for unit in plan(inputs, key=key, unit_bytes=unit_bytes, max_bytes=max_bytes):
        lines = lines if unit.files[0] == last else 0
        read = reader.read(unit)
        texts += read.texts
        places += [(file, line + lines if line else 0) for file, line in read.places]
        bad += [one._replace(line=one.line + lines if one.line else 0) for one in read.bad]
        pieces += read.pieces
        lines, last = lines + read.lines, unit.files[-1]
    whole = b"".join(
        xxhash.xxh3_128_digest(data[at : at + unit_bytes])
        for data in (Path(given.path).read_bytes() for given in inputs)
        for at in range(0, len(data), unit_bytes)
    )
    assert pieces == whole
    return texts, places, bad


@pytest.mark.parametrize("unit_bytes", [7, 64, 1000, 150_000, 10**7])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["no-end", "end"])
@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_hostile_lines_at_any_cut(tmp_path, unit_bytes, ending, end, plain):
    if unit_bytes == 7:  # hundreds of thousands of units otherwise
        lines = [(line, what) for line, what in HOSTILE if len(line) < 1000]
    else:
        lines = HOSTILE
    data = b"\n".join(line for line, _ in lines) + end
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    texts, places, bad = read_all(tmp_path, unit_bytes, plain=plain)
    expected = [
        what._replace(line=n) for n, (_, what) in enumerate(lines, 1) if isinstance(what, Bad)
    ]
    assert bad == expected
    assert texts == [what for _, what in lines if isinstance(what, str)]
    assert places == [(0, n) for n, (_, what) in enumerate(lines, 1) if isinstance(what, str)]


PIECES = [
    b'{"text": "a"}',
    b'"',
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\\u0000",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
]
PIECES += [
    b"NaN",
    b"1e999",
    b"-0",
    b"01",
    b"9" * 400,
    b"\xc2\xa0",
    b"\x0b",
    b"\t",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
]
PIECES += [
    b'{"text": "',
    b'"}',
    b'{"text": "b", "text": ',
    b": ",
    b"null",
    b"\xef\xbb\xbf",
    b"\n",
    b"\r",
    b"z",
]


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=9).map(b"".join))
@settings(max_examples=500)
def test_the_fast_parser_never_has_a_say_of_its_own(data):
    """All that it takes, the plain one takes too, with the same text; of the rest it is silent."""
    seen = []
    for plain in (False, True):
        reader = UnitReader("text", 1000, plain=plain)
        seen.append(reader.read(Held((0,), "x", True, data, b"", "", len(data))))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 500, 1025, 5000])
def test_nesting_is_judged_by_the_plain_parser(depth):
    deep = b'{"text": "a", "x": ' + b"[" * depth + b"]" * depth + b"}"
    fast, plain = (UnitReader("text", 100_000, plain=one) for one in (False, True))
    assert (fast._clean_text(deep) is None) == (depth > 63)
    unit = Held((0,), "x", True, deep, b"", "", len(deep))
    assert fast.read(unit) == plain.read(unit)


def test_orjson_is_used_where_it_is_installed(monkeypatch):
    assert UnitReader("text", 9)._parse is not None
    assert UnitReader("text", 9, plain=True)._parse is None
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert UnitReader("text", 9)._parse is None


def test_one_line_that_is_not_utf8_spoils_no_other(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xc3\xa9"}\n\xff\n \n{"text": "b"}\n')
    texts, _, bad = read_all(tmp_path, 10**6)
    assert (texts, bad) == (["aé", "b"], [Bad(0, 2, "is not UTF-8")])


def test_a_mark_of_byte_order_is_left_out_at_the_beginning_of_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"text": "c"}\n'))
    assert read_all(tmp_path, 10**6)[0] == ["a", "b", "c"]


def test_another_key(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"], key="content"))
    write_parquet(tmp_path / "b.parquet", ["b"], key="content")
    assert read_all(tmp_path, 10**6, key="content")[0] == ["a", "b"]


def test_whole_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\r\n")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n\xff")
    (tmp_path / "c.txt").write_bytes(b"a\0b")
    (tmp_path / "d.txt").write_bytes(b"x" * 300_000)
    (tmp_path / "e.txt").write_bytes(b"")
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"short")[:-4])
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress(b"x" * 300_000))
    for unit_bytes in (5, 100, 10**6):
        texts, places, bad = read_all(tmp_path, unit_bytes)
        assert (texts, places) == (["good\r\n", ""], [(0, 0), (4, 0)])
        assert bad == [
            Bad(1, 3, "is not UTF-8"),
            Bad(2, 0, "holds a NUL"),
            Bad(3, 0, "is longer than 250000 bytes"),
            Bad(5, 0, "the compressed file is cut short"),
            Bad(6, 0, "is longer than 250000 bytes"),
        ]


def test_lines_of_a_truncated_file_up_to_there(tmp_path):
    whole = json_lines([f"{n * 7919}" for n in range(20_000)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(whole)[:30_000])
    for unit_bytes in (1000, 10**7):
        texts, _, bad = read_all(tmp_path, unit_bytes)
        assert texts == [f"{n * 7919}" for n in range(len(texts))]
        assert 100 < len(texts) < 20_000
        assert bad == [Bad(0, len(texts) + 1, "the compressed file is cut short")]


@pytest.mark.parametrize("unit_bytes", [50, 1000, 10**7])
def test_rows(tmp_path, unit_bytes):
    texts = some_texts(100)
    write_parquet(tmp_path / "a.parquet", texts, rows=30)
    table = pyarrow.table({"text": pyarrow.array(["a", None, "b\0", "", "c" * 300_000, "d"])})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    again = pyarrow.table({"text": pyarrow.array(["x", "y", "x"]).dictionary_encode()})
    pyarrow.parquet.write_table(again, tmp_path / "c.parquet")
    write_parquet(tmp_path / "d.parquet", [3])
    none = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(none, tmp_path / "e.parquet")
    found, places, bad = read_all(tmp_path, unit_bytes)
    assert found == [*texts, "a", "", "d", "x", "y", "x"]
    assert places[:100] == [(0, n) for n in range(1, 101)]
    assert places[100:] == [(1, 1), (1, 4), (1, 6), (2, 1), (2, 2), (2, 3)]
    assert bad == [
        Bad(1, 2, "has no string for a text"),
        Bad(1, 3, "holds a NUL"),
        Bad(1, 5, "is longer than 250000 bytes"),
        Bad(3, 0, "has no text in column 'text'"),
    ]


def test_rows_that_are_not_utf8_or_cannot_be_read(tmp_path):
    raw = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary())
    values = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    texts, _, bad = read_all(tmp_path, 10**6)
    assert (texts, bad) == (["a", "c"], [Bad(0, 2, "is not UTF-8")])
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:60] = b"\xff" * 56  # the pages; what describes them stands at the end
    (tmp_path / "a.parquet").write_bytes(data)
    texts, _, bad = read_all(tmp_path, 10**6)
    assert (texts, bad) == ([], [Bad(0, 1, "and the rows after it cannot be read")])


def test_rows_may_be_asked_for_in_any_order(tmp_path):
    texts = [f"{n:04}" * 20 for n in range(90)]
    write_parquet(tmp_path / "a.parquet", texts, rows=45)
    inputs = find_inputs([tmp_path])
    units = list(plan(inputs, key="text", unit_bytes=400, max_bytes=10**6))
    reader = UnitReader("text", 10**6)
    assert len(units) > 8
    backwards = [reader.read(unit).texts for unit in reversed(units)]
    assert [text for part in reversed(backwards) for text in part] == texts
    skipping = [text for unit in units[::2] for text in reader.read(unit).texts]
    assert skipping == [
        text for unit in units[::2] for text in UnitReader("text", 10**6).read(unit).texts
    ]


def test_a_line_longer_than_all_memory_for_lines_is_not_read_whole(tmp_path):
    """A line of 200 MB: its first bytes are looked at, and its pieces are hashed one by one."""
    import tracemalloc

    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(json.dumps({"text": "before"}).encode() + b'\n{"text": "')
        for _ in range(200):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + json.dumps({"text": "after"}).encode())
    inputs = find_inputs([tmp_path])
    reader = UnitReader("text", 1 << 22)
    texts, bad, lines = [], [], 0
    tracemalloc.start()
    for unit in plan(inputs, key="text", unit_bytes=1 << 22, max_bytes=1 << 22):
        read = reader.read(unit)
        texts += read.texts
        bad += [one._replace(line=one.line + lines) for one in read.bad]
        lines += read.lines
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == ["before", "after"]
    assert bad == [Bad(0, 2, f"is longer than {1 << 22} bytes")]
    assert peak < 64 << 20
