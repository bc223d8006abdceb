"""What is found is what a dictionary of all documents finds, in memory that is given."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import indexed
from megablocks_core.data.index_file import write_index
from megablocks_core.data.tools import check, checking, hash_records
from megablocks_core.data.tools.hash_records import HashRecords

from .conftest import build

DTYPES = [np.uint8, np.uint16, np.int32, np.int64]
corpora = st.lists(
    st.tuples(
        st.sampled_from(DTYPES), st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=12)
    ),
    max_size=3,
)


def plain_check(ours, others):
    """Counts of each dataset and all pairs, by a dictionary."""
    theirs, first, duplicates, overlaps, rows = {}, {}, [], [], []
    for prefix, documents in others:
        for number, document in enumerate(documents):
            theirs.setdefault(tuple(document), (prefix, number))
    for prefix, documents in ours:
        twice = shared = 0
        for number, document in enumerate(map(tuple, documents)):
            if not document:
                continue
            if document in first:
                duplicates.append((prefix, number, *first[document], len(document)))
                twice += 1
            first.setdefault(document, (prefix, number))
            if document in theirs:
                overlaps.append((prefix, number, *theirs[document], len(document)))
                shared += 1
        rows.append((prefix, len(documents), documents.count([]), twice, shared))
    return rows, duplicates, overlaps


def write(folder, corpora, name):
    return [
        (build(folder / f"{name}{number}", documents, dtype), documents)
        for number, (dtype, documents) in enumerate(corpora)
    ]


def found_by(ours, others, **options):
    found = check([p for p, _ in ours], against=[p for p, _ in others], pairs=1000, **options)
    rows = [
        (one.prefix, one.documents, one.empty, one.duplicates, one.overlap)
        for one in found.datasets
    ]
    for one in found.datasets:
        assert one.duplicate_tokens == sum(
            p.tokens for p in found.duplicates if p.prefix == one.prefix
        )
        assert one.overlap_tokens == sum(p.tokens for p in found.overlaps if p.prefix == one.prefix)
    assert found.against == [p for p, _ in others]
    assert found.found == bool(found.duplicates or found.overlaps)
    return rows, [tuple(p) for p in found.duplicates], [tuple(p) for p in found.overlaps]


@pytest.mark.parametrize("passes", ["one", "many", "collisions"])
@settings(max_examples=25)
@given(ours=corpora.filter(bool), others=corpora)
def test_as_a_dictionary_finds(tmp_path_factory, passes, ours, others):
    """Also in many parts of few records, and where all hashes are equal."""
    folder = tmp_path_factory.mktemp("x")
    ours, others = write(folder, ours, "a"), write(folder, others, "b")
    with pytest.MonkeyPatch.context() as patch:
        if passes == "many":
            patch.setattr(hash_records, "FILES", 3)
            patch.setattr(hash_records, "WORKING", 1 << 24)  # four records a chunk
        if passes == "collisions":
            patch.setattr(HashRecords, "_hash", lambda self, _, bounds: one_hash(len(bounds) - 1))
            patch.setattr(hash_records, "WORKING", 1 << 24)
        assert found_by(ours, others) == plain_check(ours, others)


def one_hash(count):
    return np.full((count, 2), 7, np.uint64)


def test_the_first_pairs_are_named(tmp_path):
    documents = [[n % 10, n % 3] for n in range(5000)]
    ours, others = [(build(tmp_path / "a", documents), documents)], []
    rows, duplicates, _ = plain_check(ours, others)
    found = check([ours[0][0]], pairs=4)
    assert [tuple(pair) for pair in found.duplicates] == duplicates[:4]
    assert found.datasets[0].duplicates == rows[0][3] == 5000 - 30
    assert check([ours[0][0]], pairs=0).duplicates == []


@pytest.mark.parametrize("kind", ["different", "equal"])
def test_memory_stays_below_what_is_given(tmp_path, monkeypatch, kind):
    """Records of the corpus alone are more than that; so they are where all are equal."""
    number, memory = 25_000, 1 << 19
    monkeypatch.setattr(checking, "LEAST_MEMORY", memory)
    monkeypatch.setattr(indexed, "CHECKED_ON_OPEN", 0)  # as of more than a million entries
    tokens = np.arange(number, dtype=np.int32) * (kind == "different")
    (tmp_path / "a.bin").write_bytes(tokens.astype(np.int32).tobytes())
    with open(tmp_path / "a.idx", "wb") as file:
        lengths, bounds = np.ones(number, np.int32), np.arange(number + 1)
        write_index(file, np.dtype("<i4"), lengths, bounds, None)
    assert number * hash_records.RECORD.itemsize > memory
    tracemalloc.start()
    try:
        found = check([tmp_path / "a"], memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.datasets[0].duplicates == (0 if kind == "different" else number - 1)
    assert peak < memory


def test_a_large_memory_takes_one_part(tmp_path):
    prefix = build(tmp_path / "a", [[1], [1]])
    assert check([prefix], memory=1 << 40).found


def test_arguments(tmp_path):
    one = build(tmp_path / "a", [[1]], tokenizer="one")
    two = build(tmp_path / "b", [[1]], tokenizer="two")
    floats = build(tmp_path / "f", [[0.5]], np.float64)
    for given_, message in [
        ({"prefixes": []}, "prefixes=\\[\\] must name at least one"),
        ({"prefixes": str(one)}, "prefixes=.* must be several"),
        ({"prefixes": [one, one]}, "must be named once"),
        ({"prefixes": [one], "against": [one]}, "must be named once"),
        ({"prefixes": [one], "against": [two]}, "its tokenizer 'one' must be 'two'"),
        ({"prefixes": [floats]}, "must hold integers"),
        ({"prefixes": [one], "memory": 1}, "memory=1 must be at least 4194304"),
        ({"prefixes": [one], "pairs": -1}, "pairs=-1 must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(**given_)
