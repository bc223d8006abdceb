"""Texts are encoded as ``megablocks-tokenize`` encodes them."""

import numpy as np
import pytest
import tokenizers

from megablocks_core.data.convert import texts
from megablocks_core.data.convert.documents import BadSource, Counts
from megablocks_core.data.convert.texts import Texts, TextSource


@pytest.mark.parametrize("most", [1, 5, 1 << 20])
def test_documents_do_not_depend_on_runs(monkeypatch, most):
    monkeypatch.setattr(texts, "_CHARACTERS", most)
    given = [Texts(["ab", "", "c"], 10), Texts([], 1), Texts(["", "def"], 5)]
    counts = Counts()
    batches = list(TextSource(lambda: iter(given), 16, "bytes", 7).batches(counts))
    found = [document.tolist() for batch in batches for document in batch.documents()]
    assert found == [[*b"ab", 7], [*b"c", 7], [*b"def", 7]]
    assert counts.empty == 2
    assert sum(batch.nbytes for batch in batches) == 16
    assert {batch.tokens.dtype for batch in batches} == {np.dtype("u2")}


def test_a_text_that_the_tokenizer_fails_on_is_named(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(tmp_path / "t.json"))
    given = [Texts(["a"], 1), Texts(["a", "zzz"], 1)]
    source = TextSource(lambda: iter(given), 2, f"hf:{tmp_path / 't.json'}", False)
    with pytest.raises(BadSource, match="^text 2 'zzz' cannot be encoded by the tokenizer"):
        list(source.batches(Counts()))


def test_a_tokenizer_is_needed_and_its_end_must_be_one():
    with pytest.raises(ValueError, match="tokenizer=None must name one: the source holds texts"):
        TextSource(lambda: iter(()), 0, None, False)
    with pytest.raises(ValueError, match="append_eod=300 must be"):
        TextSource(lambda: iter(()), 0, "bytes", 300)
