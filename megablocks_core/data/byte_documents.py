"""Texts as an indexed dataset of bytes: no tokenizer, any language.

A token is a byte of UTF-8, and one more id ends each document.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megablocks_core.data.builder import IndexedDatasetBuilder, smallest_dtype
from megablocks_core.data.texts import utf8_of

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
        for content in utf8_of(texts):
            if not content:
                empty += 1
                continue
            document = np.full(len(content) + 1, END_OF_DOCUMENT, dtype)
            document[:-1] = np.frombuffer(content, np.uint8)
            builder.add_document(document)
            documents += 1
            tokens += len(content) + 1
    return ByteCounts(documents, tokens, empty)


def decode_bytes(tokens: Iterable[int]) -> str:
    """Return the text of byte tokens; ends of documents are left out, torn characters replaced."""
    try:
        content = bytes(token for token in tokens if token < END_OF_DOCUMENT)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tokens must be whole numbers, 0 or more: {error}") from None
    return content.decode(errors="replace")
