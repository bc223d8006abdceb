"""The fast engine has the same ids, or is not used."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from megablocks_core.data.tokenize import fast_engine
from megablocks_core.data.tokenize.encoders import Ids, open_encoder
from megablocks_core.data.tokenize.fast_engine import choose_engine, open_fast, refuse_difference

from .conftest import END, some_texts
from .test_flat_texts import flat


def test_ids_are_equal_on_the_test_corpus_and_in_batches(bpe):
    plain = open_encoder(f"hf:{bpe}")
    name, fast = choose_engine(f"hf:{bpe}", "auto", plain, some_texts(20))
    assert name == "gigatoken"
    texts = [*fast_engine.TEST_CORPUS, f"x{END}y", *some_texts(50)]
    for one, other in zip(plain.encode(texts), fast.encode(texts), strict=True):
        assert np.array_equal(one, other)
    assert (fast.vocab_size, fast.end, fast.name) == (plain.vocab_size, plain.end, plain.name)
    assert len(fast.encode([]).ids) == 0


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["batch", "each"])
def test_ids_are_the_same_by_batches_and_one_by_one(bpe, monkeypatch, few):
    monkeypatch.setattr(fast_engine, "_FEW", few)
    monkeypatch.setattr(fast_engine, "_LONG", 1 << 30)
    plain = open_encoder(f"hf:{bpe}")
    fast: Any = open_fast(f"hf:{bpe}", plain)
    calls = []
    engine = fast._tokenizer

    def encode_batch(*given, **options):
        calls.append(1)
        return engine.encode_batch(*given, **options)

    noted = SimpleNamespace(backend=engine.backend, encode_batch=encode_batch)
    monkeypatch.setattr(fast, "_tokenizer", noted)
    for texts in ([*fast_engine.TEST_CORPUS, *some_texts(200)], [""], ["a"], []):
        for one, other in zip(plain.encode(texts), fast.encode(texts), strict=True):
            assert np.array_equal(one, other)
            assert one.dtype == other.dtype
    assert len(calls) == (0 if few else 4)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("few", [0, 1 << 30], ids=["batch", "each"])
def test_ids_are_the_same_from_one_block_of_texts(bpe, monkeypatch, threads, few):
    monkeypatch.setattr(fast_engine, "_FEW", few)
    monkeypatch.setattr(fast_engine, "_LONG", 1 << 30)
    fast = open_fast(f"hf:{bpe}", open_encoder(f"hf:{bpe}"), threads=threads)
    many = [*fast_engine.TEST_CORPUS, f"x{END}y", "", END, "", *some_texts(200)]
    for texts in (many, many[::-1], [""], ["", ""], ["a"], []):
        for part in (flat(texts), flat(["before", *texts, "after"])[1:-1]):
            for one, other in zip(fast.encode(texts), fast.encode(part), strict=True):
                assert np.array_equal(one, other)
                assert one.dtype == other.dtype


class Differs:
    """Encodes one text in another way than its twin."""

    def __init__(self, twin, text):
        self.twin, self.text = twin, text

    def encode(self, texts):
        ids, lengths = self.twin.encode(texts)
        return Ids(ids + 1, lengths) if self.text in texts else Ids(ids, lengths)


@pytest.mark.parametrize("text", [fast_engine.TEST_CORPUS[-1], "of the input"])
def test_one_different_id_refuses_it_by_name_and_auto_does_without(bpe, monkeypatch, text):
    plain = open_encoder(f"hf:{bpe}")
    monkeypatch.setattr(fast_engine, "open_fast", lambda spec, plain: Differs(plain, text))
    texts = ["good", "of the input"]
    with pytest.raises(ValueError, match=r"must give the ids of the tokenizer's own engine"):
        choose_engine(f"hf:{bpe}", "gigatoken", plain, texts)
    assert choose_engine(f"hf:{bpe}", "auto", plain, texts) == ("hf", plain)
    with pytest.raises(ValueError, match="at token 0"):
        refuse_difference(plain, Differs(plain, text), [text])


class Fails(Differs):
    """Fails on one text, as an engine in Rust does."""

    class Panic(BaseException):
        pass

    def encode(self, texts):
        if self.text in texts:
            raise self.Panic("range end index 3")
        return self.twin.encode(texts)


@pytest.mark.parametrize("side", ["plain", "fast"])
def test_an_engine_that_fails_on_a_text_is_refused_and_auto_does_without(bpe, monkeypatch, side):
    plain: Any = open_encoder(f"hf:{bpe}")
    fails = Fails(open_encoder(f"hf:{bpe}"), "poison")
    fast = fails if side == "fast" else plain
    monkeypatch.setattr(fast_engine, "open_fast", lambda spec, plain: fast)
    if side == "plain":
        monkeypatch.setattr(plain, "encode", fails.encode)
    with pytest.raises(ValueError, match="'poison' .*failed: range end index 3"):
        choose_engine(f"hf:{bpe}", "gigatoken", plain, ["poison"])
    assert choose_engine(f"hf:{bpe}", "auto", plain, ["poison"]) == ("hf", plain)


def test_a_tokenizer_that_it_cannot_have(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    spec = f"hf:{tmp_path}"
    plain = open_encoder(spec)
    with pytest.raises(ValueError, match="engine='gigatoken' cannot have"):
        choose_engine(spec, "gigatoken", plain)
    assert choose_engine(spec, "auto", plain)[0] == "hf"


def test_other_kinds_and_names_are_refused(bpe):
    plain = open_encoder("bytes")
    assert choose_engine("bytes", "auto", plain) == ("hf", plain)
    with pytest.raises(ValueError, match="must have a tokenizer hf:PATH"):
        choose_engine("bytes", "gigatoken", plain)
    with pytest.raises(ValueError, match="engine='slow' must be one of auto, hf, gigatoken"):
        choose_engine("bytes", "slow", plain)


def test_without_the_package(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    plain = open_encoder(f"hf:{bpe}")
    assert choose_engine(f"hf:{bpe}", "auto", plain) == ("hf", plain)
    with pytest.raises(ModuleNotFoundError, match=r"megablocks-core\[gigatoken\]"):
        open_fast(f"hf:{bpe}", plain)
