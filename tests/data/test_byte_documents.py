"""Text becomes bytes and an end, and comes back."""

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
