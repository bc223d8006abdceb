"""The indexed dataset: token sequences in a ``.bin`` file, their places in an ``.idx`` file.

The format of Megatron-LM, which most of the field reads and writes; docs/indexed-format.md
has it byte by byte. Dimensions: S sequences, D documents (a document is a run of sequences).
"""

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, overload

import numpy as np
import xxhash

from megablocks_core.data.checks import prefix_of, whole_number
from megablocks_core.data.index_file import (
    CHECKED_ON_OPEN,
    HEADER,
    fault_at_the_ends,
    fault_inside,
    read_layout,
)
from megablocks_core.data.manifest import SUFFIX
from megablocks_core.data.mapped import MappedFile, read_bytes
from megablocks_core.data.publish import open_ending, open_published
from megablocks_core.data.remote import RemoteFiles

CACHE_BYTES = 1 << 28
HASHED_AT_A_TIME = 1 << 24  # bytes
SAMPLED, SAMPLE_BYTES = 64, 1 << 14  # of each file without a manifest, for the fingerprint


class IndexedDataset:
    """Read-only token sequences ``prefix.bin`` with their index ``prefix.idx``.

    ``dataset[i]`` is sequence ``i`` and ``dataset[a:b]`` a list of them. Files on this machine
    are mapped: every array is a view and nothing is copied. ``prefix`` may also be a URL of any
    kind that fsspec knows, such as ``s3://bucket/corpus``: then the same names give copies, read
    in ranges through a cache of ``cache_bytes``, with ``storage_options`` for the file system.
    The token dtype is the one in the header, always. Pickles as its prefix;
    what was replaced in the meantime is refused when it is opened again.

    Shapes: ``tokens`` [num_tokens] all sequences end to end; ``sequence_lengths`` [S] int32;
    ``sequence_pointers`` [S] int64, the byte at which each sequence begins;
    ``document_indices`` [D + 1] int64, the sequence at which each document begins, ending
    with S; ``sequence_modes`` [S] int8 or ``None`` where the file has none; ``manifest`` what
    the builder recorded, or ``None`` where another tool wrote the files.

    Sends nothing; every rank opens the files for itself.

    Raises:
        ValueError: the files are damaged or do not belong together; names the file, what it
            says and what it must say.
        OSError: a remote file gave fewer bytes than asked for, or no answer after several tries.

    Source: the ``.idx``/``.bin`` format of https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.prefix = prefix_of(prefix)
        self.index_path = self.prefix + ".idx"
        self.token_path = self.prefix + ".bin"
        self._options = {"storage_options": storage_options, "cache_bytes": cache_bytes}
        self._open_file, read_file = _files(self.prefix, self._options)
        self.manifest, index, tokens = open_published(self._open_file, read_file, self.prefix)
        self._index_file, self._token_file = index, tokens

        layout = read_layout(bytes(index.read(0, HEADER.size)), index.size, self.index_path)
        self.dtype = layout.dtype
        self.sequence_lengths = index.array("<i4", *layout.lengths)
        self.sequence_pointers = index.array("<i8", *layout.pointers)
        self.document_indices = index.array("<i8", *layout.documents)
        self.sequence_modes = index.array("i1", *layout.modes) if layout.modes else None
        self._refuse_if(fault_at_the_ends(self, tokens.size))
        self.tokens = tokens.array(self.dtype, 0, tokens.size)
        self._refuse_other_manifest()
        if layout.num_sequences + layout.num_indices <= CHECKED_ON_OPEN:
            self._refuse_if(fault_inside(self))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents D, empty ones included."""
        return len(self.document_indices) - 1

    @cached_property
    def fingerprint(self) -> str:
        """What names the content: the same for copies of the files, another for other tokens.

        Made from the hashes in the manifest; without one, from the sizes and 64 pieces of each
        file, which covers small files whole and costs the same for any size.
        """
        whole = xxhash.xxh3_128()
        if self.manifest:
            for ending in (".idx", ".bin"):
                whole.update(self.manifest.files[ending].xxh3_128.encode())
            return whole.hexdigest()
        for file in (self._index_file, self._token_file):
            whole.update(file.size.to_bytes(8, "little"))
            last = max(file.size - SAMPLE_BYTES, 0)
            for start in sorted({last * i // (SAMPLED - 1) for i in range(SAMPLED)}):
                whole.update(file.read(start, start + SAMPLE_BYTES))
        return whole.hexdigest()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            ends = (index.start, index.stop, index.step)
            given = slice(*(end if end is None else whole_number("index", end) for end in ends))
            return [self[i] for i in range(*given.indices(len(self)))]
        start, stop = self._token_range(index)
        return self.tokens[start:stop]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return ``length`` tokens of a sequence from ``offset`` on (by default all the rest)."""
        start, stop = self._token_range(index)
        offset = whole_number("offset", offset)
        rest = stop - start - offset
        length = rest if length is None else whole_number("length", length)
        if not 0 <= offset <= stop - start or not 0 <= length <= rest:
            raise ValueError(
                f"offset={offset}, length={length} must lie inside sequence {index} "
                f"of {stop - start} tokens"
            )
        return self.tokens[start + offset : start + offset + length]

    def document_start(self, document: int) -> int:
        """Return where a document begins in ``tokens``; document D begins where they end."""
        document = whole_number("document", document)
        if not 0 <= document <= self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        sequence = int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def content_hashes(self) -> np.ndarray | None:
        """Return the 64-bit hash of each document's ids, [D] uint64, as the builder recorded them.

        ``None`` where another tool wrote the files.

        Raises:
            ValueError: the file that holds them is damaged, or of another build.
        """
        if self.manifest is None:
            return None
        path = self.prefix + ".hashes"
        file = open_ending(self._open_file, self.prefix, self.manifest.build, ".hashes")
        self._refuse_changed(file, ".hashes")
        if file.size != 8 * self.num_documents:
            raise ValueError(f"{path}: holds {file.size} bytes, must hold {8 * self.num_documents}")
        return np.asarray(file.array("<u8", 0, file.size))

    def verify(self, vocab_size: int | None = None) -> None:
        """Check every entry of the index against its neighbours and, by manifest, every byte.

        With ``vocab_size`` also that every token is an id below it. ``ValueError`` if one is wrong.
        Opening checks the entries too, except for an index of more than a million. Works in
        pieces, so memory stays small.
        """
        self._refuse_if(fault_inside(self))
        if self.manifest:
            self._refuse_changed(self._index_file, ".idx")
            self._refuse_changed(self._token_file, ".bin")
            self.content_hashes()
        if vocab_size is not None:
            self._refuse_foreign_ids(whole_number("vocab_size", vocab_size, 1))

    def _refuse_foreign_ids(self, vocab_size: int) -> None:
        for first in range(0, self.num_tokens, HASHED_AT_A_TIME):
            tokens = self.tokens[first : first + HASHED_AT_A_TIME]
            wrong = (tokens < 0) | (tokens >= vocab_size)
            if wrong.any():
                place = int(wrong.argmax())
                raise ValueError(
                    f"{self.token_path}: token {first + place} is {tokens[place]}, must be an id "
                    f"from 0 to {vocab_size - 1}, as vocab_size={vocab_size} says"
                )

    def _refuse_changed(self, file: Any, ending: str) -> None:
        assert self.manifest
        found = xxhash.xxh3_128()
        for start in range(0, file.size, HASHED_AT_A_TIME):
            found.update(file.read(start, start + HASHED_AT_A_TIME))
        record = self.manifest.files[ending]
        if (file.size, found.hexdigest()) != record:
            raise ValueError(
                f"{self.prefix}{ending}: holds {file.size} bytes of xxh3-128 {found.hexdigest()}, "
                f"must hold {record.size} of {record.xxh3_128} by {self.prefix}{SUFFIX}"
            )

    def _refuse_other_manifest(self) -> None:
        """Compare what costs nothing; another tool may have replaced the files."""
        if (said := self.manifest) is None:
            return
        facts = {
            "dtype": (said.dtype, self.dtype.name),
            "num_sequences": (said.num_sequences, len(self)),
            "num_documents": (said.num_documents, self.num_documents),
            "num_tokens": (said.num_tokens, self.num_tokens),
            "the size of .idx": (said.files[".idx"].size, self._index_file.size),
        }
        for name, (recorded, found) in facts.items():
            if recorded != found:
                raise ValueError(
                    f"{self.prefix}{SUFFIX}: says {name} is {recorded}, must be {found} as in the "
                    f"files beside it; remove it if another tool replaced them"
                )

    def _token_range(self, index: int) -> tuple[int, int]:
        """Return where a sequence lies in ``tokens``, checked against the one that follows."""
        index = whole_number("index", index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        itemsize = self.dtype.itemsize
        start, length = int(self.sequence_pointers[index]), int(self.sequence_lengths[index])
        stop = start + length * itemsize
        follows = index + 1 < len(self)
        must = int(self.sequence_pointers[index + 1]) if follows else self.tokens.nbytes
        if length < 0 or stop != must or start % itemsize or not 0 <= start <= self.tokens.nbytes:
            self._refuse_if(
                f"sequence {index} takes bytes {start} to {stop}, must take whole tokens "
                f"and end at byte {must}"
            )
        return start // itemsize, stop // itemsize

    def _refuse_if(self, fault: str | None) -> None:
        if fault:
            raise ValueError(f"{self.index_path}: {fault}")

    def __reduce__(self) -> tuple[Any, ...]:
        build = self.manifest.build if self.manifest else None
        identity = (build, self._index_file.size, self._token_file.size)
        return partial(_reopened, type(self), **self._options), (self.prefix, identity)


def _reopened(
    kind: type[IndexedDataset], prefix: str, identity: tuple[str | None, int, int], **options: Any
) -> IndexedDataset:
    """Open what was pickled elsewhere, where it may be a copy without its manifest."""
    dataset = kind(prefix, **options)
    build, *sizes = identity
    found = dataset.manifest.build if dataset.manifest else None
    if (None not in (build, found) and build != found) or sizes != [
        dataset._index_file.size,
        dataset._token_file.size,
    ]:
        raise ValueError(f"{prefix}: was replaced since the dataset was opened that was pickled")
    return dataset


def _files(
    prefix: str, options: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[str], bytes]]:
    """Return what opens a file and what reads a small one, here or behind a URL."""
    if "://" not in prefix:
        return MappedFile, read_bytes
    files = RemoteFiles(prefix, **options)
    return files.open, files.read
