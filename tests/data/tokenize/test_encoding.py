"""A unit's ids are those of its texts one by one."""

import numpy as np
import pytest

from megablocks_core.data.content import ContentHash
from megablocks_core.data.tokenize import encoding
from megablocks_core.data.tokenize.encoders import Ids, open_encoder
from megablocks_core.data.tokenize.encoding import Settings, UnitEncoder, content_hashes
from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.reading import Bad
from megablocks_core.data.tokenize.units import plan

from .conftest import END, json_lines


def encode(folder, tokenizer, end, texts):
    (folder / "a.jsonl").write_bytes(json_lines(texts))
    name = open_encoder(tokenizer).name
    encoder = UnitEncoder(Settings(tokenizer, name, "hf", end, "uint16", "text", 10**6))
    (unit,) = plan(find_inputs([folder]), key="text", unit_bytes=10**6, max_bytes=10**6)
    return encoder, unit


@pytest.mark.parametrize("batch", [1, 5, 10**6])
@pytest.mark.parametrize("end", [None, 0])
def test_a_unit(tmp_path, bpe, monkeypatch, batch, end):
    monkeypatch.setattr(encoding, "_BATCH", batch)
    monkeypatch.setattr(encoding, "_WIDE", batch)
    texts = ["", "the model", f"a{END}b", "", "数据", ""]
    encoder, unit = encode(tmp_path, f"hf:{bpe}", end, texts)
    found = encoder.encode(unit)
    plain = open_encoder(f"hf:{bpe}")
    ends = [] if end is None else [end]
    rows = [[*plain.encode([text]).ids.tolist(), *ends] for text in texts if text]
    assert found.ids.tolist() == [token for row in rows for token in row]
    assert (found.ids.dtype, found.lengths.dtype) == ("uint16", "int32")
    assert found.lengths.tolist() == [len(row) for row in rows]
    hashes = []
    for row in rows:
        content = ContentHash()
        content.update(np.array(row))
        hashes.append(content.value())
    assert found.hashes.tolist() == hashes
    assert (found.empty, found.bad, found.lines) == (3, [], 6)
    assert found.text_bytes == sum(len(text.encode()) for text in texts)
    assert found.inner_ends == (0 if end is None else 1)


def test_f_146_the_end_counts_in_the_length(tmp_path):
    encoder, unit = encode(tmp_path, "bytes", 256, ["abc"])
    found = encoder.encode(unit)
    assert (found.lengths.tolist(), found.ids.tolist()) == ([4], [97, 98, 99, 256])


def test_a_text_that_the_tokenizer_fails_on_is_bad_and_spoils_no_other(tmp_path, monkeypatch):
    class Panic(BaseException):
        """As those of engines in Rust are."""

    encoder, unit = encode(tmp_path, "bytes", None, ["a", "poison", "", "b"])
    real = encoder._encoder.encode

    def fails(texts):
        if "poison" in texts:
            raise Panic
        return real(texts)

    monkeypatch.setattr(encoder._encoder, "encode", fails)
    found = encoder.encode(unit)
    assert found.ids.tobytes() == "ab".encode("utf-16-le")
    assert found.bad == [Bad(0, 2, "cannot be encoded by the tokenizer")]
    assert (found.empty, found.text_bytes) == (1, 2)

    for stops in (KeyboardInterrupt, MemoryError):

        def raises(texts, stops=stops):
            raise stops

        monkeypatch.setattr(encoder._encoder, "encode", raises)
        with pytest.raises(stops):
            encoder.encode(unit)


def test_f_111_no_id_wraps(tmp_path, monkeypatch):
    """An id that the vocabulary does not have is never stored as another."""
    encoder, unit = encode(tmp_path, "bytes", None, ["a"])
    wrong = Ids(np.array([70_000], np.uint32), np.array([1]))
    monkeypatch.setattr(encoder._encoder, "encode", lambda texts: wrong)
    found = encoder.encode(unit)
    assert len(found.ids) == 0
    assert found.bad == [Bad(0, 1, "cannot be encoded by the tokenizer")]


def test_a_tokenizer_that_changed_is_refused(bpe):
    settings = Settings(f"hf:{bpe}", "hf of before", "hf", None, "uint16", "text", 10**6)
    with pytest.raises(ValueError, match=r"tokenizer='hf:.*' has changed since"):
        UnitEncoder(settings)


def test_hashes_of_no_documents():
    assert content_hashes(np.empty(0, np.uint16), np.empty(0, np.int64)).tolist() == []


def test_the_fast_engine_alone_encodes_as_with_its_twin(tmp_path, bpe, monkeypatch):
    texts = ["", "the model", f"a{END}b", "数据"]
    _, unit = encode(tmp_path, f"hf:{bpe}", 0, texts)
    plain = open_encoder(f"hf:{bpe}")
    common = (f"hf:{bpe}", plain.name, "gigatoken", 0, "uint16", "text", 10**6)
    both = UnitEncoder(Settings(*common)).encode(unit)
    monkeypatch.setattr(encoding, "open_encoder", None)
    alone = UnitEncoder(Settings(*common, plain.vocab_size)).encode(unit)
    for one, other in zip(both, alone, strict=True):
        assert np.array_equal(one, other)
    assert len(alone.ids) > 3
    with pytest.raises(ValueError, match="has changed since the run began"):
        UnitEncoder(Settings(f"hf:{bpe}", "hf of before", *common[2:], plain.vocab_size))
