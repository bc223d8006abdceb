"""Whatever an input holds becomes a text or a reason, at any cut into units."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core import _native
from megablocks_core.data.tokenize import reading
from megablocks_core.data.tokenize.flat_texts import FlatTexts
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
    *(b'{"text": "a"}', b'{"text": "', b'"}', b'{"text": "b", "text": ', b'{"\\u0074ext": "c", '),
    *(b'"x": ', b"{", b"}", b"[", b"]", b",", b": ", b"null", b"true", b'"', b"z", b"\n", b"\r"),
    *(b"\\n", b"\\\\", b'\\"', b"\\/", b"\\x", b"\\u00e9", b"\\u12", b"\\u0000", b"\0", b"\t"),
    *(b"\\ud800", b"\\ud83d\\ude00", b"\\uDBFF\\uDFFF", b"\\ude00", b"\\ud83d\\u0041", b"\x1f"),
    *(b"\xff", b"\xc3\xa9", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80"),
    *(b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xe4\xb8", b"\xc2\xa0", b"\xef\xbb\xbf", b"\x7f"),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"01", b"1.", b".5", b"1E+5", b"2e", b"9" * 400),
    *(b"9" * 5000, b"\x0b", b"plain letters, more than a register holds"),
]


def both_ways(data, key="text", max_bytes=1000):
    """What is read of lines by the extension, and by the plain twin."""
    unit = Held((0,), "x", True, data, b"", "", len(data))
    reads = [UnitReader(key, max_bytes, plain=plain).read(unit) for plain in (False, True)]
    return [one._replace(texts=list(one.texts), places=list(one.places)) for one in reads]


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=9).map(b"".join))
@settings(max_examples=1500)
def test_the_fast_parser_never_has_a_say_of_its_own(data):
    """All that it takes, the plain one takes too, with the same text; of the rest it is silent."""
    fast, plain = both_ways(data)
    assert fast == plain


BOUNDARIES = "\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff".encode()
# What may stand in a string, well formed or not.
INSIDES = [
    *(b"\\\\", b'\\"', b"\\/", b"\\n", b"\\x", b"\\N", b"\\", b"\\u00e9", b"\\uABCD", b"\\u00g0"),
    *(b"\\u12", b"\\u 123", b"\\u+123", b"\\u00E9\\u00e9", b"\\u0000", b"\\u0001", b"\\u007F"),
    *(b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\\uDBFF\\uDFFF", b"\\ude00\\ud83d"),
    *(b"\\ud83d\\ud83d", b"\\ud83d\\u0041", b"\\ud83d\\ue000", b"\\ud83dx", b"\\ud83d\\n"),
    *(bytes([byte]) for byte in range(256)),
    *(BOUNDARIES[at:] for at in range(len(BOUNDARIES))),
    *(BOUNDARIES[:-at] for at in range(1, len(BOUNDARIES))),
    *(b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80"),
    *(b"\xf0\x8f\xbf\xbf", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf4\x90\x80\x80"),
    *(b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xc2\x41", b"\xe4\xb8\x41", b"\xe4\x41\x80"),
    *(b"\xf8\x90\x80\x80", b"\xf0\x9f\x98\xc0", b"\xc3\xc3\xa9", b"\xef\xbb\xbf"),
]
# What may stand where a value does.
OTHERS = [
    *(b"0", b"-0", b"01", b"-01", b"00", b"-", b"+1", b"1.", b"1.0", b"1.e1", b".5", b"1.5.5"),
    *(b"1e5", b"1E+5", b"1e-5", b"1e", b"1e+", b"1e+-1", b"1e1.5", b"0e0", b"0x1", b"1_0", b"1 2"),
    *(b"1e999", b"-1e999", b"9" * 400, b"9" * 401, b"9" * 5000, b"0." + b"9" * 5000),
    *(b"true", b"truE", b"tru", b"truex", b"false", b"fals", b"null", b"nul", b"nulL", b"nan"),
    *(b"NaN", b"Infinity", b"-Infinity", b"", b"x", b"'a'", b'"', b'"a', b"\xc2\xa0", b"\x0b1"),
    *(b"[", b"]", b"[]", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[ ]", b"[1]]"),
    *(b"{", b"}", b"{ }", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b"{,}", b"{1:2}"),
    *(b'{"a" 1}', b'{"a"::1}', b'{"a":1 "b":2}', b'{"a":1,,"b":2}', b"{a:1}", b'{"a"}', b"{]"),
    *(b'{"a":1}}', b"[}", b'[{"a": [1, {"b": null}]}, "c"]', b'{"text": "inner"}', b"//\n1"),
    *(b'1}, {"y": 2', b'1, "text": "again"', b'1, "text": null', b'1, "te\\u0078t": "again"'),
]


def strings_and_values():
    """Lines with each of them, in strings at any place in a register, before the text and after."""
    for at in range(34):
        pad = b"p" * at
        for inside in INSIDES:
            yield b'{"text": "' + pad + inside + b'"}'
    for inside in INSIDES:
        yield b'{"text": "' + inside + b'tail of a text that fills one more register"}'
        yield b'{"' + inside + b'": 1, "text": "a", "x": ["' + inside + b'"]}'
        yield b'{"text": "a"}' + inside
        yield inside + b'{"text": "a"}'
    for other in OTHERS:
        yield b'{"x": ' + other + b', "text": "a"}'
        yield b'{"text": "a", "x":' + other + b"}"
        yield b'{"text": "a", "x": [' + other + b", 1]}"
        yield b'{"text": ' + other + b"}"
        yield other
    whole = b'{"x": [1.5, {"y": true}], "text": "a\\u00e9\xc3\xa9"}'
    for at in range(len(whole)):
        yield whole[:at]
        yield whole[:at] + whole[at + 1 :]
        yield whole[:at] + b" " + whole[at:]


def test_each_string_and_value_is_what_it_is_to_the_twin():
    lines = list(strings_and_values())
    for first in range(0, len(lines), 1000):
        data = b"\n".join(line for line in lines[first : first + 1000])
        fast, plain = both_ways(data, max_bytes=100_000)
        assert fast.bad == plain.bad
        assert fast == plain


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["text", "a", "tex", "texts", "é"]), VALUES, max_size=4)


@st.composite
def dumped_lines(draw):
    """Objects with a text, most of them, written in several ways; a byte may be another."""
    rows = draw(st.lists(st.builds(dict, OBJECTS, text=st.text() | VALUES), max_size=5))
    spaces = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "  :\r")]))
    plainly = draw(st.booleans())
    lines = [json.dumps(row, ensure_ascii=plainly, separators=spaces) for row in rows]
    ends = [draw(st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"])) for _ in lines]
    data = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
    if data and draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.binary(max_size=1)) + data[at + 1 :]
    return data


@given(dumped_lines())
@settings(max_examples=300)
def test_the_fast_parser_and_its_twin_read_the_same_of_dumped_objects(data):
    fast, plain = both_ways(data, max_bytes=200)
    assert fast == plain


def left_over(data, key=b"text", max_bytes=10**6):
    """Number, begin and end of each line that the extension leaves to the plain twin."""
    return _native.texts_of_lines(data, key=key, max_bytes=max_bytes)[3].reshape(-1, 3).tolist()


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "letters, several registers of them: \\"quoted\\" \\\\ \\/ \\n\\t\\r\\b\\f"}',
        b'\t{ "id" : -1.5e+3 , "text" :"a\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80 \\u4e2d" } \r',
        b'{"x": [1, [], {}, {"text": null, "y": [true, false]}], "text": "\\ud83d\\ude00"}',
        b'{"text": "first", "text": "last", "n": 0}',
        b'{"text": ""}',
        b"  \r",
        b"",
    ],
)
def test_plain_lines_are_taken_by_the_extension(line):
    data = b'{"text": "before"}\n' + line + b'\n{"text": "after"}'
    assert left_over(data) == []
    fast, plain = both_ways(data)
    assert fast == plain
    assert len(fast.texts) == (3 if line.strip() else 2)


@pytest.mark.parametrize(
    "line",
    [
        b'{"t\\u0065xt": "a"}',
        b'{"text": "half \\ud800"}',
        b'{"text": "a\\u0000"}',
        b'{"text": 3, "text": "a"}',
        b'{"text": "a", "x": NaN}',
        b'{"text": "a", "x": ' + b"9" * 401 + b"}",
        b'{"text": "a"} x',
        b" " * 2000,
    ],
)
def test_a_line_that_needs_care_is_left_to_the_twin_in_its_place(line):
    data = b'{"text": "before"}\n' + line + b'\n\n{"text": "after"}\n'
    assert left_over(data, max_bytes=1000) == [[2, 19, 19 + len(line)]]
    fast, plain = both_ways(data)
    assert fast == plain
    assert (fast.texts[0], fast.texts[-1], fast.lines) == ("before", "after", 4)


@pytest.mark.parametrize("depth", [1, 62, 63, 64, 65, 500, 1025, 5000])
@pytest.mark.parametrize("ends", [b"[]", b"{}"])
def test_deep_nesting_is_judged_by_the_plain_parser(depth, ends):
    opening, closing = (b"[", b"]") if ends == b"[]" else (b'{"a":', b"}")
    deep = b'{"text": "a", "x": ' + opening * depth + b"1" + closing * depth + b"}"
    assert bool(left_over(deep)) == (depth > 63)
    fast, plain = both_ways(deep, max_bytes=100_000)
    assert fast == plain


@pytest.mark.parametrize("key", ["", "é", 'a"b', "a\\b", "a\nb", "\0", "\ud800"])
def test_any_key(key):
    escaped = json.dumps({key: "a"}).encode()
    raw = b'{"' + key.encode("utf-8", "surrogatepass") + b'": "b", "n": 1}'
    fast, plain = both_ways(escaped + b"\n" + raw, key=key)
    assert fast == plain
    assert fast.texts[0] == "a"


def test_the_extension_is_used_where_it_is_built(monkeypatch):
    data = b'{"text": "a"}'
    unit = Held((0,), "x", True, data, b"", "", len(data))
    assert isinstance(UnitReader("text", 99).read(unit).texts, FlatTexts)
    assert isinstance(UnitReader("text", 99, plain=True).read(unit).texts, list)
    monkeypatch.setattr(reading, "_native", None)
    assert isinstance(UnitReader("text", 99).read(unit).texts, list)


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
