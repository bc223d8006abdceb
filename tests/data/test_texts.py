"""Texts are found in order, and bad ones are named."""

import json

import pytest

from megablocks_core.data import (
    read_texts,
    shuffled_pieces,
    standard_library,
    write_byte_documents,
)


def test_folders_are_read_in_order_and_text_only(tmp_path):
    for name, content in (
        ("b.txt", b"second"),
        ("a/z.py", b"first"),
        ("c.pyc", b"\xa7\r\r\n\x80"),
        ("d.jsonl", b'{"text": "third"}\n\n{"text": "fourth"}\n'),
        ("e.JSONL", b'{"text": "fifth"}\n'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(read_texts(tmp_path)) == ["first", "second", "third", "fourth", "fifth"]
    assert list(read_texts(tmp_path, suffixes=(".py",))) == ["first"]
    assert list(read_texts(tmp_path / "b.txt", tmp_path / "a")) == ["second", "first"]
    with pytest.raises(ValueError, match=r"c\.pyc: must be UTF-8"):
        list(read_texts(tmp_path / "c.pyc"))
    with pytest.raises(FileNotFoundError):
        list(read_texts(tmp_path / "missing"))


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"[1]", b"{}", b'{"text": 5}', b'{"text": null}', b'"text"', b"\xff",
             json.dumps({"text": "\ud800"}).encode(), pytest.param(b"[" * 100_000, id="deep")]
)  # fmt: skip
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line):
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    for path in (lines, tmp_path):
        with pytest.raises(ValueError, match=r"a\.jsonl: line 2 must be a JSON object"):
            write_byte_documents(read_texts(path), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_standard_library_reads_as_text():
    files = standard_library()
    assert {("json", "encoder.py"), ("email", "message.py")} <= {path.parts[-2:] for path in files}
    assert sum(map(len, read_texts(*files))) > 4_000_000


def test_pieces_hold_every_byte_once_in_an_order_of_the_seed():
    texts = ["a" * 150, "b" * 50, "never reached"]
    pieces = shuffled_pieces(texts, max_bytes=200)
    assert sorted(pieces) == [b"aa"] * 75 + [b"bb"] * 25
    assert pieces == shuffled_pieces(texts, max_bytes=200) != sorted(pieces)
    assert pieces != shuffled_pieces(texts, max_bytes=200, seed=1)
    assert b"".join(shuffled_pieces(["one"], max_bytes=2)) in (b"on", b"no")
    assert shuffled_pieces([], max_bytes=2) == []
    with pytest.raises(ValueError, match="max_bytes=0"):
        shuffled_pieces(texts, max_bytes=0)


def test_suffixes_may_be_a_list_or_one(tmp_path):
    for name in ("a.py", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    for suffixes in ([".py", ".md"], {".md", ".py"}, iter([".py", ".md"])):
        assert list(read_texts(tmp_path, suffixes=suffixes)) == ["a.py", "c.md"]
    assert list(read_texts(tmp_path, suffixes=".md")) == ["c.md"]
    with pytest.raises(ValueError, match="suffixes=.* must be ends of names"):
        list(read_texts(tmp_path, suffixes=[".py", 3]))
