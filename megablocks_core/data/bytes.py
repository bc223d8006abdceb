"""Text files as an indexed dataset of bytes: no tokenizer, any language, any file.

A token is a byte of UTF-8, and one more id ends each document.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megablocks_core.data.builder import IndexedDatasetBuilder, smallest_dtype

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


class ByteCounts(NamedTuple):
    """What was written, and how many empty texts were left out."""

    documents: int
    tokens: int
    empty: int


def write_byte_documents(
    texts: Iterable[str | bytes], prefix: str | os.PathLike[str], *, overwrite: bool = False
) -> ByteCounts:
    """Write each text as a document of its UTF-8 bytes and ``END_OF_DOCUMENT``.

    The end counts in the document's length. An empty text gives no document. The dataset
    appears under ``prefix`` whole or not at all.
    """
    documents = tokens = empty = 0
    dtype = smallest_dtype(VOCAB_SIZE)
    with IndexedDatasetBuilder(prefix, dtype=dtype, overwrite=overwrite) as builder:
        for text in texts:
            content = text.encode() if isinstance(text, str) else text
            if not content:
                empty += 1
                continue
            document = np.full(len(content) + 1, END_OF_DOCUMENT, dtype)
            document[:-1] = np.frombuffer(content, np.uint8)
            builder.add_document(document)
            documents += 1
            tokens += len(content) + 1
    return ByteCounts(documents, tokens, empty)


def read_texts(*paths: str | os.PathLike[str], suffixes: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the texts of files and folders, in the order given.

    A ``.jsonl`` file yields the ``"text"`` of each line, any other file its whole text. A
    folder yields its files and those of the folders inside, sorted by path: those that end in
    ``suffixes`` if any are given, and without those that are not UTF-8 text. Such a file
    named itself is a ``ValueError``, and so is a line that is no JSON object with a
    ``"text"``, wherever it stands.
    """
    for path in map(Path, paths):
        if path.is_dir():
            for inside in sorted(path.rglob("*")):
                if inside.is_file() and inside.name.endswith(suffixes or ("",)):
                    with suppress(UnicodeDecodeError):
                        yield from _texts_of(inside)
        else:
            try:
                yield from _texts_of(path)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: must be UTF-8 text ({error})") from None


def decode_bytes(tokens: Iterable[int]) -> str:
    """Return the text of byte tokens; ends of documents are left out, torn characters replaced."""
    return bytes(token for token in tokens if token < END_OF_DOCUMENT).decode(errors="replace")


def _texts_of(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_bytes().decode()
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _text_of(line, f"{path}: line {number}")


def _text_of(line: bytes, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f'{place} must be a JSON object with a "text" of UTF-8') from None
    return text
