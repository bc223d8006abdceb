"""Each id stands for the characters that it was made of, whatever tokenizer made it."""

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.instructions.offsets import Located, open_locator
from megablocks_core.data.tokenize.encoders import open_encoder

from .conftest import SPECIAL

TEXTS = [
    "plain words",
    "naïve 数据 \U0001f600 x",
    "a<|im_start|>b\n<|im_end|>",
    "two  spaces\n",
    "",
]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
        user_defined_symbols=["<|im_start|>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
    )
    return f"sp:{folder / 'm.model'}"


@pytest.fixture
def encoding_of_tiktoken(monkeypatch):
    encoding = tiktoken.Encoding(
        "ours",
        pat_str=r"\S+|\s+",
        mergeable_ranks={bytes([n]): n for n in range(256)} | {b"ab": 256},
        special_tokens={"<|im_start|>": 257},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return "tiktoken:ours"


def check(locator, decode):
    for text, located in zip(TEXTS, locator.locate(TEXTS), strict=True):
        ids, starts, stops = located
        assert len(ids) == len(starts) == len(stops)
        covered = set()
        for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            assert 0 <= start < stop <= len(text)
            covered |= set(range(start, stop))
            shared = [n for n in range(len(ids)) if starts[n] < stop and stops[n] > start]
            if shared == [number]:  # no other id stands for these characters
                assert decode([int(ids[number])]) == text[start:stop]
        assert covered == set(range(len(text)))


def test_bytes():
    locator = open_locator("bytes")
    check(locator, lambda ids: bytes(ids).decode())
    located = locator.locate(["é\U0001f600"])[0]
    assert located.starts.tolist() == [0, 0, 1, 1, 1, 1]
    assert located.stops.tolist() == [1, 1, 2, 2, 2, 2]


def test_hugging_face(bpe):
    locator = open_locator(f"hf:{bpe}")
    plain = open_encoder(f"hf:{bpe}")
    decode = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json")).decode
    check(locator, lambda ids: decode(ids, skip_special_tokens=False))
    for text, located in zip(TEXTS, locator.locate(TEXTS), strict=True):
        assert located.ids.tolist() == plain.encode([text]).ids.tolist()
    assert sorted(locator.special) == sorted(SPECIAL)


def test_tiktoken(encoding_of_tiktoken):
    locator = open_locator(encoding_of_tiktoken)
    check(locator, tiktoken.get_encoding("ours").decode)
    assert 257 in locator.locate(["a<|im_start|>"])[0].ids, "what a template writes is a token"
    assert locator.special == ["<|im_start|>"]


def test_sentencepiece(sentencepiece_model):
    locator = open_locator(sentencepiece_model)
    processor = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_model[3:])

    def decode(ids):
        piece = processor.id_to_piece(ids[0])
        return (
            chr(int(piece[3:5], 16)) if processor.is_byte(ids[0]) else piece.replace("\u2581", " ")
        )

    check(locator, decode)
    unseen = locator.locate(["aü€b"])[0]
    assert [unseen.inside([span]).tolist() for span in ((1, 2), (2, 3), (3, 4))] == [
        [False, True, True, False, False, False, False],
        [False, False, False, True, True, True, False],
        [False, False, False, False, False, False, True],
    ]
    for text, located in zip(TEXTS, locator.locate(TEXTS), strict=True):
        assert located.ids.tolist() == processor.encode(text)


@given(st.data())
def test_inside_is_any_shared_character(data):
    cuts = sorted(data.draw(st.lists(st.integers(0, 20), max_size=8)))
    spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b]
    spans = [span for n, span in enumerate(spans) if not n or spans[n - 1][1] <= span[0]]
    starts = sorted(data.draw(st.lists(st.integers(0, 20), max_size=12)))
    stops = [start + data.draw(st.integers(1, 3)) for start in starts]
    located = Located(np.arange(len(starts)), np.array(starts, int), np.array(stops, int))
    plain = [
        any(set(range(a, b)) & set(range(start, stop)) for a, b in spans)
        for start, stop in zip(starts, stops, strict=True)
    ]
    assert located.inside(spans).tolist() == plain
