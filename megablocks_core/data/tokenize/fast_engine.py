"""The fast engine for Hugging Face's tokenizers, taken only where its ids are the same.

Source: gigatoken (https://github.com/marcelroed/gigatoken), which implements byte-level and
sentencepiece-like BPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megablocks_core.data.packages import package
from megablocks_core.data.tokenize.encoders import (
    Encoder,
    HFEncoder,
    Ids,
    name_of_hf,
    tokenizer_file,
)
from megablocks_core.data.tokenize.flat_texts import FlatTexts, utf8_sizes

AUTO, HF, GIGATOKEN = "auto", "hf", "gigatoken"
ENGINES = (AUTO, HF, GIGATOKEN)
# A batch call loads awkward, for a third of a second in each process. It saves 2 us a text, which
# is little where texts are few, or of so many characters.
_FEW, _LONG = 64, 1024


class GigatokenEncoder:
    """Encodes as the tokenizer it stands for, whose names and ends it has.

    Without that one it has the name and the size that are given, and knows no token by its text.
    With ``threads`` it encodes by batch calls alone, beside which other threads run.
    """

    def __init__(
        self, path: str, plain: Encoder | None, vocab_size: int = 0, *, threads: bool = False
    ) -> None:
        data = tokenizer_file(path).read_bytes()
        self._batches = threads
        self._plain, self._tokenizer = plain, _package().Tokenizer.from_json(data)
        self.vocab_size, self.name = plain.vocab_size if plain else vocab_size, name_of_hf(data)
        self.end = plain.end if plain else None

    def id_of(self, token: str) -> int | None:
        """The id of a token of the vocabulary or an added one."""
        return self._plain.id_of(token) if self._plain else None

    def encode(self, texts: Sequence[str]) -> Ids:
        """The ids, made on this thread."""
        sizes = utf8_sizes(texts)
        if not self._batches and (len(texts) < _FEW or sizes.sum() > _LONG * len(texts)):
            encode = self._tokenizer.backend.encode
            each = [encode(text) for text in _contents(texts)]
            lengths = np.fromiter(map(len, each), np.int64, len(each))
            return Ids(np.concatenate([np.empty(0, np.uint32), *each]), lengths)
        if isinstance(texts, FlatTexts):
            given, found = _package().BytesSource(texts.joined(), b"\0"), sizes > 0
        else:
            given, found = list(texts), slice(None)
        rows = self._tokenizer.encode_batch(given, parallel=False).layout
        bounds = np.asarray(rows.offsets.data)
        ids = np.asarray(rows.content.data)[bounds[0] : bounds[-1]]
        lengths = np.zeros(len(texts), np.int64)
        lengths[found] = np.diff(bounds)  # it leaves out empty texts between two NULs
        return Ids(ids, lengths)


def _contents(texts: Sequence[str]) -> Sequence[str] | list[bytes]:
    return texts.contents() if isinstance(texts, FlatTexts) else texts


def choose_engine(
    spec: str, engine: str, plain: Encoder, texts: Sequence[str] = ()
) -> tuple[str, Encoder]:
    """The engine that is used, and the tokenizer in it.

    Args:
        spec: The tokenizer.
        engine: One of ``ENGINES``; ``AUTO`` is the fast one where it can be had.
        plain: The tokenizer in its own engine.
        texts: Of the input; ids must be equal on these and on ``TEST_CORPUS``.

    Raises:
        ValueError: The fast engine is asked for, and cannot have the tokenizer, or its ids differ.
        ModuleNotFoundError: It is asked for and not installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
    if engine == HF or (engine == AUTO and not isinstance(plain, HFEncoder)):
        return HF, plain
    try:
        fast = open_fast(spec, plain)
        refuse_difference(plain, fast, [*TEST_CORPUS, *texts])
    except (ModuleNotFoundError, ValueError):
        if engine == GIGATOKEN:
            raise
        return HF, plain
    return GIGATOKEN, fast


def open_fast(
    spec: str, plain: Encoder | None, vocab_size: int = 0, *, threads: bool = False
) -> Encoder:
    """The tokenizer in the fast engine.

    Args:
        spec: The tokenizer.
        plain: The same in its own engine. Where ids were compared before, only to encode, ``None``
            saves the time to open it.
        vocab_size: One more than its largest id, without ``plain``.
        threads: Whether other threads run while it encodes.

    Raises:
        ValueError: It cannot have it.
        ModuleNotFoundError: It is not installed.
    """
    kind, _, path = spec.partition(":")
    if kind != "hf":
        raise ValueError(f"engine='gigatoken' must have a tokenizer hf:PATH, not {spec!r}")
    _package()
    try:
        return GigatokenEncoder(path, plain, vocab_size, threads=threads)
    except Exception as error:  # it has no class of its own for what it cannot do
        raise ValueError(f"engine='gigatoken' cannot have {spec!r}: {error}") from None


def refuse_difference(plain: Encoder, fast: Encoder, texts: Sequence[str]) -> None:
    """Raise ``ValueError`` if two tokenizers differ on a text, or one fails on it."""
    for text in texts:
        expected, found = (_encoded(encoder, text) for encoder in (plain, fast))
        if not np.array_equal(expected.ids, found.ids):
            at = _first_difference(expected.ids, found.ids)
            raise ValueError(
                f"engine='gigatoken' must give the ids of the tokenizer's own engine; of the text "
                f"{text[:60]!r} it has {found.ids[at : at + 3].tolist()} at token {at}, not "
                f"{expected.ids[at : at + 3].tolist()}"
            )


def _encoded(encoder: Encoder, text: str) -> Ids:
    try:
        return encoder.encode([text])
    except BaseException as error:  # a panic of an engine in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ValueError(
            f"engine='gigatoken' must give the ids of the tokenizer's own engine; on the text "
            f"{text[:60]!r} one of them failed: {error}"
        ) from None


def _first_difference(one: np.ndarray, other: np.ndarray) -> int:
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else shared


def _package() -> Any:
    return package("gigatoken", what="engine='gigatoken'", extra="gigatoken")


# What tokenizers are known to differ on: white space, contractions, digits, scripts with and
# without spaces, marks that combine, emoji in sequences, code, and strings of special tokens.
TEST_CORPUS = (
    "",
    " ",
    "a",
    "  two  spaces   three\t\ttabs \n\n newline\r\nreturn \n",
    "\n\n\n   \n",
    "trailing   ",
    "I'm you're they've he'll SHE'LL don'T it's 'quoted' o'clock l'eau",
    "0 12 123 1234 12345 1,234,567.89 1e-10 0xFF 2026-12-02 3rd \u0661\u0662\u0663 \u00bd \u2167",
    "CamelCase snake_case kebab-case ALLCAPS mIxEd iOS9 x86_64 C++ C# a.b.c",
    "def f(x):\n    return [y**2 for y in x if y != 0]  # ok\n\n\nclass A:\n\tpass\n",
    '{"key": [1, 2.5, null, true], "nested": {"a\\n": "\\u00e9"}}',
    "https://example.org/a?b=c&d=%20#frag user@example.org ../path/to/file.txt",
    "Stra\u00dfe na\u00efve fa\u00e7ade \u0141\u00f3d\u017a \u0130stanbul \u01c5 \ufb01n \u212b",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \u1100\u1161\u11a8 vs \uac01, \u0344",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442, "
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u03c2\u03c3",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u65e5\u672c\u8a9e\u3001\u30ab\u30bf\u30ab\u30ca"
    "\u3068\u3072\u3089\u304c\u306a \ud55c\uad6d\uc5b4 \u3000\u5168\u89d2\uff21\uff11",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea\u05b0 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u10e5\u10d0\u10e0",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f "
    "\U0001f44d\U0001f3fd \u2603",
    "zero\u200bwidth soft\u00adhyphen nbsp\u00a0here \u2028line \u2029para \ufeffbom \u0085nel",
    "\x01\x02\x1b[31m\x7f control",
    "\U0001d4d0\U00020000\U0010ffff\ue000 \ufffd",
    "<|endoftext|> <s></s> <pad> [CLS] [SEP] [MASK] <unk> <|im_start|>user<|im_end|> <0x0A>",
    "\u2581 underscore \u2581\u2581 \u0120 \u010a",
    "a" * 3000,
    " " * 1000 + "x" + "\n" * 500,
    "ab" * 700 + "!?" * 300 + "\u00e9" * 400,
    "$$$ --- === ((([[[{{{ \u2026 \u2014 \u201cquotes\u201d \u2018single\u2019 \u20ac\u00a3\u00a5",
)
