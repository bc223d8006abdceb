"""The ids of a text, and the characters that each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megablocks_core.data.packages import package
from megablocks_core.data.tokenize.encoders import ByteEncoder, tokenizer_file


class Located(NamedTuple):
    """A text's ids, and the characters [start, stop) of each, all [n].

    Where a character is several ids, each of them stands for it.
    """

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def inside(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Which ids share a character with spans, which are in order and apart, [n] bool."""
        begins = np.array([start for start, _ in spans], np.int64)
        ends = np.array([stop for _, stop in spans], np.int64)
        nth = np.searchsorted(ends, self.starts, side="right")  # the first that ends after it began
        found = nth < len(spans)
        found[found] = self.stops[found] > begins[nth[found]]
        return found


class Locator(Protocol):
    """A tokenizer that tells where its ids come from; what a template writes is its own tokens.

    Attributes:
        special: The texts of tokens that a text should not hold, as they would be those.
    """

    special: Sequence[str]

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """The ids of each text, with nothing added."""
        ...


def open_locator(spec: str) -> Locator:
    """The tokenizer that ``open_encoder`` takes the same name for."""
    kind, _, name = spec.partition(":")
    if spec == "bytes":
        return ByteLocator()
    return {"hf": HFLocator, "tiktoken": TiktokenLocator, "sp": SentencePieceLocator}[kind](name)


class ByteLocator:
    """The id is the byte's value."""

    special: Sequence[str] = ()

    def __init__(self) -> None:
        self._encoder = ByteEncoder()

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """The bytes of UTF-8."""
        return [_of_bytes(self._encoder.encode([text]).ids, text) for text in texts]


class HFLocator:
    """A tokenizer of Hugging Face's ``tokenizers``."""

    def __init__(self, path: str) -> None:
        tokenizers = package("tokenizers", what="this tokenizer", extra="instructions")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file(path)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = [token.content for token in added if token.special]

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """The ids, without those that a post-processor would add."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        located = []
        for encoding in found:
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            located.append(Located(np.array(encoding.ids, np.uint32), spans[:, 0], spans[:, 1]))
        return located


class TiktokenLocator:
    """An encoding of tiktoken, whose special tokens a template may write."""

    def __init__(self, name: str) -> None:
        tiktoken = package("tiktoken", what="this tokenizer", extra="instructions")
        self._encoding = tiktoken.get_encoding(name)
        self.special = sorted(self._encoding.special_tokens_set)

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """The ids."""
        located = []
        for text in texts:
            ids = self._encoding.encode(text, allowed_special="all")
            lengths = np.fromiter(map(len, self._encoding.decode_tokens_bytes(ids)), np.int64)
            located.append(_of_bytes(np.array(ids, np.uint32), text, lengths))
        return located


class SentencePieceLocator:
    """A model of sentencepiece, whose user-defined symbols a template may write."""

    def __init__(self, path: str) -> None:
        sentencepiece = package("sentencepiece", what="this tokenizer", extra="instructions")
        data = Path(path).read_bytes()
        self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        self.special: Sequence[str] = ()

    def locate(self, texts: Sequence[str]) -> list[Located]:
        """The ids, without begin and end."""
        located = []
        for text in texts:
            found = self._processor.encode(text, return_type="offset_mapping")
            spans = np.array(found["offsets"], np.int64).reshape(-1, 2)
            starts, stops = spans[:, 0], spans[:, 1].copy()
            for place in np.flatnonzero(starts == stops)[::-1].tolist():
                if place + 1 < len(stops):  # all bytes of a character but its last have no width
                    stops[place] = stops[place + 1]
            located.append(Located(np.array(found["ids"], np.uint32), starts, stops))
        return located


def _of_bytes(ids: np.ndarray, text: str, lengths: np.ndarray | None = None) -> Located:
    """Ids that stand for so many bytes of a text each, by default one."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000).astype(np.int64)
    character_of = np.arange(len(codes)).repeat(sizes)
    if lengths is None:
        return Located(ids, character_of, character_of + 1)
    ends = np.cumsum(lengths)
    return Located(ids, character_of[ends - lengths], character_of[ends - 1] + 1)
