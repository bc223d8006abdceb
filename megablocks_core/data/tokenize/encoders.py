"""Tokenizers behind one call: a list of texts to ids and lengths.

``bytes``, ``hf:PATH`` (a ``tokenizer.json`` or its folder), ``tiktoken:NAME`` and ``sp:PATH``.
Nothing is added to a text's ids. Of Hugging Face's tokenizers, the string of a special token in a
text is that token, as in their own ``encode``; of the others it is text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from megablocks_core.data.byte_documents import END_OF_DOCUMENT, VOCAB_SIZE
from megablocks_core.data.packages import package

# What the end of a document is called where nothing says so.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Ids(NamedTuple):
    """The ids of some texts end to end, unsigned, and how many each has, int64."""

    ids: np.ndarray
    lengths: np.ndarray


class Encoder(Protocol):
    """A tokenizer.

    Attributes:
        vocab_size: One more than its largest id.
        name: What it is, whatever path it was read from.
        end: The id that its makers end documents with, if they name one.
    """

    vocab_size: int
    name: str
    end: int | None

    def encode(self, texts: Sequence[str]) -> Ids:
        """The ids of texts."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token of the vocabulary."""
        ...


def open_encoder(spec: str) -> Encoder:
    """The tokenizer that a text such as ``hf:PATH`` names.

    Raises:
        ValueError: The text names none, or its file holds none.
        ModuleNotFoundError: Its package is missing.
    """
    kind, _, name = str(spec).partition(":")
    if spec == "bytes":
        return ByteEncoder()
    if not name or kind not in ("hf", "tiktoken", "sp"):
        raise ValueError(f"tokenizer={spec!r} must be bytes, hf:PATH, tiktoken:NAME or sp:PATH")
    return {"hf": HFEncoder, "tiktoken": TiktokenEncoder, "sp": SentencePieceEncoder}[kind](name)


class ByteEncoder:
    """The id is the byte's value."""

    vocab_size, name = VOCAB_SIZE, "bytes"
    end: int | None = END_OF_DOCUMENT

    def encode(self, texts: Sequence[str]) -> Ids:
        """The bytes of UTF-8."""
        contents = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, contents), np.int64, len(contents))
        return Ids(np.frombuffer(b"".join(contents), np.uint8), lengths)

    def id_of(self, token: str) -> int | None:
        """None has a name."""
        return None


class HFEncoder:
    """A tokenizer of Hugging Face's ``tokenizers``."""

    def __init__(self, path: str) -> None:
        tokenizers = package("tokenizers", what="this tokenizer")
        file = tokenizer_file(path)
        data = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # it raises nothing more special
            raise ValueError(f"{file}: is no tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.name = name_of_hf(data)
        self.end = _declared_end(file, vocabulary)

    def encode(self, texts: Sequence[str]) -> Ids:
        """The ids, without those that a post-processor would add."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([encoding.ids for encoding in found])

    def id_of(self, token: str) -> int | None:
        """The id of a token of the vocabulary or an added one."""
        return self._tokenizer.token_to_id(token)


class TiktokenEncoder:
    """An encoding of tiktoken, which it finds by name."""

    def __init__(self, name: str) -> None:
        tiktoken = package("tiktoken", what="this tokenizer")
        try:
            self._encoding = tiktoken.get_encoding(name)
        except ValueError as error:
            raise ValueError(f"tokenizer='tiktoken:{name}' must be an encoding: {error}") from None
        self.vocab_size = self._encoding.n_vocab
        special = {token: self.id_of(token) for token in self._encoding.special_tokens_set}
        parts = (self._encoding._pat_str, self._encoding._mergeable_ranks, special)
        facts = repr([parts[0], sorted(parts[1].items()), sorted(special.items())])
        self.name = f"tiktoken {name} xxh3_128:{xxhash.xxh3_128_hexdigest(facts.encode())}"
        self.end = next((special[token] for token in _ENDS if token in special), None)

    def encode(self, texts: Sequence[str]) -> Ids:
        """The ids; no text is a special token."""
        return _joined([self._encoding.encode_ordinary(text) for text in texts])

    def id_of(self, token: str) -> int | None:
        """The id of a special token or any other."""
        with suppress(KeyError):
            return self._encoding.encode_single_token(token)
        return None


class SentencePieceEncoder:
    """A model of sentencepiece."""

    def __init__(self, path: str) -> None:
        sentencepiece = package("sentencepiece", what="this tokenizer")
        if not Path(path).is_file():
            raise ValueError(f"tokenizer='sp:{path}' must be a file that exists")
        data = Path(path).read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise ValueError(f"{path}: is no model of sentencepiece: {error}") from None
        self.vocab_size = self._processor.vocab_size()
        self.name = f"sp xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
        end = self._processor.eos_id()
        self.end = None if end < 0 else end

    def encode(self, texts: Sequence[str]) -> Ids:
        """The ids, without begin and end."""
        return _joined(self._processor.encode(list(texts), out_type=int, num_threads=1))

    def id_of(self, token: str) -> int | None:
        """The id of a piece."""
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None


def end_of_document(encoder: Encoder, append_eod: bool | int | str) -> int | None:
    """The id to end documents with: the tokenizer's own if ``True``, or the one given.

    Raises:
        ValueError: There is none, or no such one.
    """
    if append_eod is False:
        return None
    if append_eod is True:
        if encoder.end is None:
            raise ValueError(
                "append_eod=True needs a tokenizer that names its end of document; give the "
                "token or its id"
            )
        return encoder.end
    found = append_eod if isinstance(append_eod, int) else encoder.id_of(append_eod)
    if found is None or not 0 <= found < encoder.vocab_size:
        raise ValueError(
            f"append_eod={append_eod!r} must be a token of the vocabulary, or an id from 0 to "
            f"{encoder.vocab_size - 1}"
        )
    return found


def name_of_hf(data: bytes) -> str:
    """The name of a tokenizer of Hugging Face, of whose ``tokenizer.json`` these are the bytes."""
    return f"hf xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def tokenizer_file(path: str) -> Path:
    """The ``tokenizer.json`` that a path names, or the folder it stands in."""
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"tokenizer='hf:{path}' must be a tokenizer.json, or its folder")
    return file


def _declared_end(file: Path, vocabulary: dict[str, int]) -> int | None:
    """The ``eos_token`` of the configuration beside it, or the only usual one it has."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((file.parent / "tokenizer_config.json").read_bytes())
        token = config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocabulary:
            return vocabulary[token]
    usual = [vocabulary[token] for token in _ENDS if token in vocabulary]
    return usual[0] if len(usual) == 1 else None


def _joined(rows: list[list[int]]) -> Ids:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Ids(np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum())), lengths)
