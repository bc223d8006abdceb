"""The manifest of an indexed dataset: what its files hold, and a hash of each.

``PREFIX.manifest.json`` is also what publishes a dataset (``data/publish.py``). Its last key is
the xxh3-128 of all before it, so that a changed byte of the manifest itself shows.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xxhash

SUFFIX = ".manifest.json"
FORMAT, FORMAT_VERSION = "megablocks_core.data", 1
_HASH_KEY = ',\n "xxh3_128": "'


class FileRecord(NamedTuple):
    """The size and the xxh3-128 of one file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What the builder knew of a dataset.

    Attributes:
        build: A name no other build has; staged files bear it until they are in place.
        dtype: Of the tokens.
        num_sequences: Of the index.
        num_documents: Of the index.
        num_tokens: Of the token file.
        tokenizer: Whatever names the tokenizer, if the builder was told.
        files: By ending, ``.bin``, ``.idx`` and ``.hashes``.
    """

    build: str
    dtype: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    tokenizer: str | None
    files: dict[str, FileRecord]

    def text(self) -> str:
        """The manifest as it is written."""
        body: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        body["files"] = {ending: record._asdict() for ending, record in self.files.items()}
        head = json.dumps(body, indent=1).removesuffix("\n}")
        return f'{head}{_HASH_KEY}{_digest(head)}"\n}}\n'


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: it is not what was written, or of another version.
    """
    try:
        text = data.decode()
        head, found, tail = text.rpartition(_HASH_KEY)
        body = json.loads(text)
        if not found or tail != f'{_digest(head)}"\n}}\n':
            raise ValueError("its last key must be the hash of all before it")
        if (body.pop("format"), body.pop("version")) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"it must be of version {FORMAT_VERSION} of {FORMAT}")
        del body["xxh3_128"]
        files = {ending: FileRecord(**record) for ending, record in body.pop("files").items()}
        return Manifest(**body, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: is no manifest of a dataset: {error}") from error


def _digest(head: str) -> str:
    return xxhash.xxh3_128_hexdigest(head.encode())
