"""Ids become the text that they were made of; what is no id stands out."""

import pytest
import tokenizers

from megablocks_core.data.tokenize.encoders import open_encoder
from megablocks_core.data.tools.decoding import Decoder, decoder_of

TEXTS = ["plain words", "naïve 数据 \U0001f600", "two\nlines", ""]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """A tokenizer of byte-level BPE with one special token, 256."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return f"hf:{path}"


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_texts_come_back(kind, spec):
    name = kind if kind == "bytes" else spec
    encoder, decoder = open_encoder(name), Decoder(name)
    assert decoder.name == encoder.name
    for text in TEXTS:
        assert decoder(encoder.encode([text]).ids.tolist()) == text


def test_special_tokens_and_what_is_no_id_stand_in_the_text(spec):
    decoder, encoder = Decoder(spec), open_encoder(spec)
    end, size = encoder.id_of("<|endoftext|>"), encoder.vocab_size
    ids = encoder.encode(["words"]).ids.tolist()
    assert decoder([end, *ids]) == "<|endoftext|>words"
    assert decoder([*ids, size, -1, *ids]) == f"words<id {size}><id -1>words"
    assert Decoder("bytes")([97, 256, 98, 255]) == "a<id 256>b�"


def test_tiktoken(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "small",
        pat_str=r"\w+|\W",
        mergeable_ranks={bytes([n]): n for n in range(256)} | {b"ab": 256},
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    decoder, encoder = Decoder("tiktoken:small"), open_encoder("tiktoken:small")
    for text in TEXTS:
        assert decoder(encoder.encode([text]).ids.tolist()) == text
    assert decoder([256, 300, 280, 999]) == "ab<|endoftext|><id 280><id 999>"


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["plain words here", "and more words there"] * 20),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    spec = f"sp:{tmp_path}/m.model"
    ids = open_encoder(spec).encode(["plain words"]).ids.tolist()
    assert Decoder(spec)(ids) == "plain words"
    assert Decoder(spec)([*ids, 10**6]) == "plain words<id 1000000>"


def test_the_tokenizer_is_the_one_that_was_recorded(spec):
    name = open_encoder(spec).name
    assert decoder_of("bytes", None).name == "bytes"
    assert decoder_of(name, None) is None and decoder_of(None, None) is None
    assert decoder_of(name, spec).name == name
    assert decoder_of("gpt2", spec).name == name  # a name that a builder was given
    for recorded, given in (("bytes", spec), (name, "bytes"), (f"{name}0", spec)):
        with pytest.raises(ValueError, match="which the ids are of"):
            decoder_of(recorded, given)
    with pytest.raises(ValueError, match="tokenizer='x' must be bytes"):
        decoder_of(None, "x")
