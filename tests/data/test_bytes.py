"""Text becomes bytes and an end, and comes back."""

import json

import pytest

from megablocks_core.data import (
    END_OF_DOCUMENT,
    VOCAB_SIZE,
    IndexedDataset,
    decode_bytes,
    read_texts,
    write_byte_documents,
)


def test_bytes_of_text_come_back(tmp_path):
    texts = ["abc", "zwölf ☃\n", b"\xff\x00"]
    counts = write_byte_documents(texts, tmp_path / "a")
    dataset = IndexedDataset(tmp_path / "a")
    assert counts == (3, 4 + 12 + 3, 0)
    assert counts.tokens == dataset.num_tokens
    assert dataset.num_documents == 3
    assert dataset.dtype == "uint16"
    assert dataset[0].tolist() == [97, 98, 99, END_OF_DOCUMENT]
    assert dataset[2].tolist() == [255, 0, END_OF_DOCUMENT]
    assert [decode_bytes(dataset[i]) for i in (0, 1)] == texts[:2]
    assert decode_bytes(dataset[1][:3]) == "zw\N{REPLACEMENT CHARACTER}"  # a torn character
    assert max(dataset.tokens) < VOCAB_SIZE


def test_f_145_an_empty_text_gives_no_document_and_is_counted(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": ""}\n{"text": "a b"}\n')
    counts = write_byte_documents(read_texts(lines), tmp_path / "a")
    assert (counts.documents, counts.empty) == (1, 1)
    assert decode_bytes(IndexedDataset(tmp_path / "a")[0]) == "a b"


def test_f_146_the_end_counts_in_the_length(tmp_path):
    write_byte_documents(["abc"], tmp_path / "a")
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.sequence_lengths.tolist() == [4]
    assert dataset[0][-1] == END_OF_DOCUMENT
    assert (tmp_path / "a.bin").stat().st_size == 4 * dataset.dtype.itemsize


def test_folders_are_read_in_order_and_text_only(tmp_path):
    for name, content in (
        ("b.txt", b"second"),
        ("a/z.py", b"first"),
        ("c.pyc", b"\xa7\r\r\n\x80"),
        ("d.jsonl", b'{"text": "third"}\n\n{"text": "fourth"}\n'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(read_texts(tmp_path)) == ["first", "second", "third", "fourth"]
    assert list(read_texts(tmp_path, suffixes=(".py",))) == ["first"]
    assert list(read_texts(tmp_path / "b.txt", tmp_path / "a")) == ["second", "first"]
    with pytest.raises(ValueError, match=r"c\.pyc: must be UTF-8"):
        list(read_texts(tmp_path / "c.pyc"))
    with pytest.raises(FileNotFoundError):
        list(read_texts(tmp_path / "missing"))


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"[1]", b"{}", b'{"text": 5}', b'{"text": null}', b'"text"', b"\xff",
             json.dumps({"text": "\ud800"}).encode()]
)  # fmt: skip
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, line):
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    for path in (lines, tmp_path):
        with pytest.raises(ValueError, match=r"a\.jsonl: line 2 must be a JSON object"):
            write_byte_documents(read_texts(path), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
