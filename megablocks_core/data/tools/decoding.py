"""Ids to text, by the tokenizers that ``megablocks-tokenize`` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from megablocks_core.data.byte_documents import decode_bytes
from megablocks_core.data.packages import package
from megablocks_core.data.tokenize.encoders import open_encoder, tokenizer_file

BYTES = "bytes"
KINDS = ("hf xxh3_128:", "sp xxh3_128:", "tiktoken ")  # how names in manifests begin


class Decoder:
    """The text of ids.

    Special tokens stay in the text. Ids that the vocabulary does not have stand as ``<id 9>``, and
    so does the end of a document of bytes.

    Args:
        spec: ``bytes``, ``hf:PATH``, ``tiktoken:NAME`` or ``sp:PATH``.

    Attributes:
        name: What it is, as a manifest names it.

    Raises:
        ValueError: The text names no tokenizer, or its file holds none.
        ModuleNotFoundError: Its package is missing.
    """

    def __init__(self, spec: str) -> None:
        encoder = open_encoder(spec)  # refuses what cannot be had
        self.name, self.vocab_size = encoder.name, encoder.vocab_size
        kind, _, where = spec.partition(":")
        self._decode = _FUNCTIONS[kind](where)
        self._known = 256 if spec == BYTES else self.vocab_size

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        parts = []
        for known, group in groupby(ids, lambda one: 0 <= one < self._known):
            run = list(group)
            parts.append(self._decode(run) if known else "".join(f"<id {one}>" for one in run))
        return "".join(parts)


def decoder_of(recorded: str | None, spec: str | None) -> Decoder | None:
    """What decodes the ids of a dataset whose manifest names a tokenizer.

    Without ``spec`` that is possible for bytes alone.

    Raises:
        ValueError: ``spec`` is another tokenizer than was recorded.
    """
    if spec is None:
        return Decoder(BYTES) if recorded == BYTES else None
    decoder = Decoder(spec)
    ours = recorded is not None and (recorded == BYTES or recorded.startswith(KINDS))
    if ours and decoder.name != recorded:
        raise ValueError(
            f"tokenizer={spec!r} is {decoder.name!r}, must be {recorded!r}, which the ids are of"
        )
    return decoder


def _of_bytes(_: str) -> Callable[[list[int]], str]:
    return decode_bytes


def _of_hf(path: str) -> Callable[[list[int]], str]:
    tokenizers = package("tokenizers", what="this tokenizer")
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_file(path).read_text(encoding="utf-8"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _of_tiktoken(name: str) -> Callable[[list[int]], str]:
    encoding = package("tiktoken", what="this tokenizer").get_encoding(name)

    def decode(ids: list[int]) -> str:
        parts = []
        for one in ids:
            try:
                parts.append(encoding.decode_single_token_bytes(one))
            except KeyError:  # a number below its largest that it gave to no token
                parts.append(f"<id {one}>".encode())
        return b"".join(parts).decode(errors="replace")

    return decode


def _of_sentencepiece(path: str) -> Callable[[list[int]], str]:
    sentencepiece = package("sentencepiece", what="this tokenizer")
    model = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
    return lambda ids: model.decode(ids)


_FUNCTIONS = {"bytes": _of_bytes, "hf": _of_hf, "tiktoken": _of_tiktoken, "sp": _of_sentencepiece}
