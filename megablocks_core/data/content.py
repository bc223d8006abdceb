"""Splits by content: a document's split depends on its ids alone, not on where it lies.

Dimensions: D documents.
"""

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from megablocks_core.data.checks import whole_number
from megablocks_core.data.indexed import IndexedDataset
from megablocks_core.data.permutation import GOLDEN, WORD, mix
from megablocks_core.data.split import Split, split_documents
from megablocks_core.files import replace_file

PIECE = 1 << 22  # tokens or documents at a time
SPOTS = 64  # documents whose hash is computed again
SHARES = 1 << 53  # parts of the hash space: as many as a float tells apart


class ContentHash:
    """The 64-bit hash of a document's ids, which come in parts.

    xxh3-64 of the ids as little-endian int64 (of other values as float64), so that it depends
    neither on the dtype they are stored in nor on where sequences end.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, tokens: np.ndarray) -> None:
        """Go on with the tokens that follow."""
        for first in range(0, len(tokens), PIECE):
            piece = tokens[first : first + PIECE]
            self._hash.update(piece.astype("<f8" if piece.dtype.kind == "f" else "<i8").data)

    def value(self) -> int:
        """Return the hash of all tokens so far."""
        return self._hash.intdigest()


def hash_documents(dataset: IndexedDataset, dtype: np.dtype | None = None) -> np.ndarray:
    """Return the content hash of each document, [D] uint64, by reading all of them.

    ``dtype``: as it is once it is stored in that dtype.
    """
    hashes = np.empty(dataset.num_documents, np.uint64)
    stop = 0
    for document, size in enumerate(_document_sizes(dataset).tolist()):
        start, stop = stop, stop + size
        hashes[document] = _hash(dataset, start, stop, dtype or dataset.dtype)
    return hashes


def split_by_content(
    dataset: IndexedDataset,
    weights: str | Sequence[float],
    *,
    names: Sequence[str] = ("train", "valid", "test"),
    seed: int = 0,
) -> dict[str, Split]:
    """Give each document to the split that the hash of ``seed`` and its content falls into.

    Each split takes a share of the hash space in proportion to its weight. So equal documents
    are in one split, wherever they lie and whatever dtype holds them, and no document moves when
    the corpus grows, is merged or shuffled; the sizes are near the weights, not exact.

    The content hashes are those that ``IndexedDatasetBuilder`` wrote to ``PREFIX.hashes``; where
    another tool wrote the files, all tokens are read and hashed. The documents of each split and
    their offsets are kept beside them as ``PREFIX.split-KEY.npy``, if the folder can be written
    to; ``KEY`` is a hash of the dataset, the weights and the seed, and the next call maps the file.

    Shapes: each split has ``documents`` [d] int64, in file order, and ``offsets`` [d + 1] int64.
    Sends nothing; every rank does it for itself, with the same result.

    Raises:
        ValueError: weights as in ``split_documents``, a seed outside 0 to 2**64 - 1, or a
            ``PREFIX.hashes`` that does not belong to the tokens.

    Source: assignment by hash as in Kohavi et al., *Controlled experiments on the web* (2009),
    section 4.1; the mixer is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014).
    """
    seed = whole_number("seed", seed, 0, WORD)
    if not isinstance(dataset, IndexedDataset):
        raise ValueError(f"dataset={dataset!r} must be an IndexedDataset")
    shares = split_documents(SHARES, weights, names=names).values()
    bounds = np.cumsum([len(share.documents) for share in shares]).astype(np.uint64)
    table = _kept(dataset, bounds, seed)
    return {
        name: Split(name, documents, offsets)
        for name, documents, offsets in zip(names, table[::2], table[1::2], strict=True)
    }


def _kept(dataset: IndexedDataset, bounds: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return documents and offsets of each split, from the file that keeps them if it is there."""
    if dataset.manifest is None or "://" in dataset.prefix:
        return _assign(dataset, bounds, seed)
    recipe = f"{dataset.fingerprint} {bounds.tolist()} {seed}"
    path = Path(f"{dataset.prefix}.split-{xxhash.xxh3_128_hexdigest(recipe.encode())}.npy")
    with suppress(OSError, ValueError, EOFError):
        return _load(path, dataset, len(bounds))
    table = _assign(dataset, bounds, seed)
    sizes = np.array([len(documents) for documents in table[::2]], np.int64)
    file = io.BytesIO()
    np.save(file, np.concatenate([sizes, *table]))
    with suppress(OSError):  # a folder that cannot be written to, or a full disk
        replace_file(path, file.getvalue())
    return table


def _load(path: Path, dataset: IndexedDataset, num_splits: int) -> list[np.ndarray]:
    """Map what ``_kept`` wrote; ``ValueError`` if it cannot be of this dataset."""
    whole = np.asarray(np.load(path, mmap_mode="r"))
    sizes = whole[:num_splits].tolist()
    if (
        whole.dtype != np.int64
        or whole.ndim != 1
        or len(sizes) != num_splits
        or min(sizes) < 0
        or sum(sizes) != dataset.num_documents
        or len(whole) != 2 * num_splits + 2 * sum(sizes)
    ):
        raise ValueError(f"{path}: holds splits of another dataset")
    table, end = [], num_splits
    for size in sizes:
        for length in (size, size + 1):
            table.append(whole[end : end + length])
            end += length
    if sum(int(offsets[-1]) for offsets in table[1::2]) != dataset.num_tokens:
        raise ValueError(f"{path}: holds splits of another dataset")
    return table


def _assign(dataset: IndexedDataset, bounds: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return documents and offsets of each split, one after the other."""
    if (hashes := dataset.content_hashes()) is None:
        hashes = hash_documents(dataset)
    else:
        _spot_check(dataset, hashes)
    seeded = hashes ^ _stirred(np.array([seed], np.uint64))
    places = _stirred(seeded) // np.uint64((1 << 64) // SHARES)
    last = int(np.flatnonzero(np.diff(bounds, prepend=np.uint64(0)))[-1])
    split_of = np.minimum(np.searchsorted(bounds, places, "right"), last)
    sizes = _document_sizes(dataset)
    table = []
    for split in range(len(bounds)):
        documents = np.flatnonzero(split_of == split)
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(sizes[documents], out=offsets[1:])
        table += [documents, offsets]
    return table


def _spot_check(dataset: IndexedDataset, hashes: np.ndarray) -> None:
    """Refuse hashes of other tokens, should another tool have replaced files of equal sizes."""
    some = np.unique(np.linspace(0, dataset.num_documents - 1, SPOTS).astype(np.int64))
    for document in some.tolist() if dataset.num_documents else []:
        start, stop = (dataset.document_start(document + end) for end in (0, 1))
        if stop - start > PIECE:
            continue
        if (found := _hash(dataset, start, stop, dataset.dtype)) != hashes[document]:
            raise ValueError(
                f"{dataset.prefix}.hashes: says {int(hashes[document]):016x} of document "
                f"{document}, must say {found:016x} for its tokens"
            )


def _document_sizes(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens of each document, [D] int64."""
    ends = np.append(np.asarray(dataset.sequence_pointers), dataset.tokens.nbytes)
    return np.diff(ends[np.asarray(dataset.document_indices)]) // dataset.dtype.itemsize


def _hash(dataset: IndexedDataset, start: int, stop: int, dtype: np.dtype) -> int:
    content = ContentHash()
    for first in range(start, stop, PIECE):
        tokens = dataset.tokens[first : min(first + PIECE, stop)]
        content.update(tokens.astype(dtype, copy=False))
    return content.value()


def _stirred(words: np.ndarray) -> np.ndarray:
    """Return what SplitMix64 gives after each word: 64 bits, all of which depend on all of it."""
    return mix(words + np.uint64(GOLDEN))
