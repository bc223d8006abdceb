"""The reader gives back what the format says, and refuses what it cannot mean."""

import pickle
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, index_file, indexed

CODES = ["B", "b", "h", "i", "q", "d", "f", "H"]  # struct letters of the dtype codes 1 to 8


def files(sequences, documents, *, code=4, modes=b""):
    """Return the bytes of an index and its tokens, packed one number at a time."""
    letter = CODES[code - 1]
    tokens, pointers = b"", []
    for sequence in sequences:
        pointers.append(len(tokens))
        tokens += struct.pack(f"<{len(sequence)}{letter}", *sequence)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(documents)}q", *documents)
    return index + modes, tokens


def write(path, index, tokens):
    prefix = path / "data"
    for ending, data in ((".idx", index), (".bin", tokens)):
        put(prefix.with_suffix(ending), data)
    return prefix


def put(path, data):
    """Write a new file, which is many times faster than to write into one."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]
DOCUMENTS = [0, 2, 2, 4]


@pytest.mark.parametrize("code", range(1, 9))
def test_reads_every_dtype(tmp_path, code):
    dataset = IndexedDataset(write(tmp_path, *files(SEQUENCES, DOCUMENTS, code=code)))
    assert dataset.dtype == np.dtype(CODES[code - 1])
    assert [x.tolist() for x in dataset] == SEQUENCES
    assert dataset.sequence_lengths.tolist() == [3, 0, 1, 2]
    assert dataset.document_indices.tolist() == DOCUMENTS
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 3, 6)
    assert dataset.sequence_modes is None
    dataset.verify()


def test_reads_modes_where_the_file_has_them(tmp_path):
    index = files(SEQUENCES, DOCUMENTS, modes=bytes([0, 1, 1, 0]))
    modes = IndexedDataset(write(tmp_path, *index)).sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 1, 0]


def test_slices_parts_and_ends(tmp_path):
    dataset = IndexedDataset(write(tmp_path, *files(SEQUENCES, DOCUMENTS)))
    assert [x.tolist() for x in dataset[2:]] == SEQUENCES[2:]
    assert [x.tolist() for x in dataset[::-2]] == SEQUENCES[::-2]
    assert dataset[-1].tolist() == [5, 6]
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(0, 3).tolist() == []
    for outside in (4, -5):
        with pytest.raises(IndexError, match="of 4"):
            dataset[outside]
    for offset, length in ((4, None), (-1, None), (1, 3), (0, -1)):
        with pytest.raises(ValueError, match="must lie inside sequence 0 of 3 tokens"):
            dataset.get(0, offset, length)


def test_copies_nothing_and_lets_nothing_be_written(tmp_path):
    dataset = IndexedDataset(write(tmp_path, *files(SEQUENCES, DOCUMENTS)))
    for part in (dataset[0], dataset[1:3][1], dataset.get(3, 1)):
        assert np.shares_memory(part, dataset.tokens)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 7


def test_pickles_as_its_prefix(tmp_path):
    prefix = write(tmp_path, *files([list(range(100_000))], [0, 1]))
    pickled = pickle.dumps(IndexedDataset(prefix))
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[0][-1] == 99_999


@pytest.mark.parametrize("documents", [[0], [0, 0, 0]])
def test_an_empty_dataset_opens(tmp_path, documents):
    dataset = IndexedDataset(write(tmp_path, *files([], documents)))
    assert (len(dataset), dataset.num_tokens) == (0, 0)
    assert dataset.num_documents == len(documents) - 1
    assert dataset.document_start(0) == 0
    assert dataset[:] == []


@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=6),
)
def test_documents_begin_where_a_plain_count_says(tmp_path_factory, lengths, cuts):
    ends = sorted(min(cut, len(lengths)) for cut in cuts) + [len(lengths)]
    sequences = [[0] * n for n in lengths]
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("d"), *files(sequences, [0, *ends])))
    places = [sum(lengths[:s]) for s in [0, *ends]]
    assert [dataset.document_start(d) for d in range(len(places))] == places


def test_f_107_a_short_token_file_is_refused_on_opening(tmp_path):
    index, tokens = files([[1, 2, 3, 4]] * 3, [0, 3])
    prefix = write(tmp_path, index, tokens[:-7])
    with pytest.raises(ValueError) as caught:
        IndexedDataset(prefix)
    for part in ("holds 41 bytes", "must hold 48", f"{prefix}.bin", f"{prefix}.idx"):
        assert part in str(caught.value)


def test_f_112_tokens_beyond_2_31_are_found(tmp_path):
    """Twelve gigabytes with a hole in them, of which the last token is 7."""
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4) + struct.pack("<3i", *[2**30] * 3)
    index += struct.pack("<7q", 0, 2**32, 2**33, 0, 1, 2, 3)
    prefix = write(tmp_path, index, b"")
    with open(prefix.with_suffix(".bin"), "r+b") as file:
        file.truncate(3 * 2**32 - 4)
        file.seek(3 * 2**32 - 4)
        file.write(b"\7\0\0\0")
    dataset = IndexedDataset(prefix)
    dataset.verify()
    assert dataset.num_tokens == 3 * 2**30
    assert [dataset.document_start(d) for d in range(4)] == [0, 2**30, 2**31, 3 * 2**30]
    assert dataset.get(2, 2**30 - 2).tolist() == [0, 7]
    assert len(dataset.fingerprint) == 32


FAULTS = {
    "header cut": (lambda index: index[:20], "holds 20 bytes, its header alone takes 34"),
    "empty": (lambda index: b"", "holds 0 bytes"),
    "magic": (lambda index: b"X" + index[1:], "must begin with"),
    "version": (lambda index: index[:9] + b"\2" + index[10:], "version 2 must be 1"),
    "dtype code": (lambda index: index[:17] + b"\x09" + index[18:], "dtype code 9 must be one of"),
    "sequence count": (lambda index: index[:18] + b"\5" + index[19:], "its 5 sequences"),
    "huge count": (lambda index: index[:18] + b"\xff" * 8 + index[26:], "its 18446744073709551615"),
    "document count": (lambda index: index[:26] + b"\5" + index[27:], "5 document indices"),
    "cut": (lambda index: index[:-1], "holds 113 bytes, must hold 114"),
    "longer": (lambda index: index + b"\0", "holds 115 bytes, must hold 114"),
    "first pointer": (lambda index: index[:50] + b"\4" + index[51:], "must begin at byte 0"),
    "middle pointer": (
        lambda index: index[:66] + b"\x08" + index[67:],
        "sequence 2 begins at byte 8, must begin at byte 12, where sequence 1 ends",
    ),
    "last pointer": (lambda index: index[:74] + b"\x14" + index[75:], "must hold 28"),
    "length": (lambda index: index[:34] + b"\2" + index[35:], "must begin at byte 8"),
    "negative length": (
        lambda index: index[:38] + b"\xff" * 4 + index[42:],
        "sequence 1 has -1 tokens",
    ),
    "first document": (lambda index: index[:82] + b"\1" + index[83:], "must begin at sequence 0"),
    "documents not monotone": (
        lambda index: index[:90] + b"\3" + index[91:],
        "document 1 ends at sequence 2, must not end before sequence 3",
    ),
    "last document": (lambda index: index[:106] + b"\3" + index[107:], "must end at sequence 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_index_is_refused_by_name(tmp_path, fault):
    damage, message = FAULTS[fault]
    index, tokens = files(SEQUENCES, DOCUMENTS)
    prefix = write(tmp_path, damage(index), tokens)
    with pytest.raises(ValueError) as caught:
        IndexedDataset(prefix)
    assert str(prefix) in str(caught.value)
    assert message in str(caught.value)


def test_an_index_without_document_indices_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 document indices, must have at least 1"):
        IndexedDataset(write(tmp_path, *files([], [])))


def test_every_truncation_is_refused(tmp_path):
    index, tokens = files(SEQUENCES, DOCUMENTS)
    for length in range(len(index)):
        with pytest.raises(ValueError, match="data.idx"):
            IndexedDataset(write(tmp_path, index[:length], tokens))
    for length in range(len(tokens)):
        with pytest.raises(ValueError, match="data.bin"):
            IndexedDataset(write(tmp_path, index, tokens[:length]))


def test_every_flipped_bit_is_refused_or_harmless(tmp_path):
    """Nothing in the format tells a moved border between documents from the right one."""
    index, tokens = files(SEQUENCES, DOCUMENTS)
    accepted = {}
    for bit in range(8 * len(index)):
        changed = bytearray(index)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            dataset = IndexedDataset(write(tmp_path, bytes(changed), tokens))
        except ValueError:
            continue
        assert [len(x) for x in dataset] == [3, 0, 1, 2]
        accepted[bit // 8] = dataset
    assert set(accepted) <= {*range(90, 106)}  # the inner document indices
    for dataset in accepted.values():
        assert [x.tolist() for x in dataset] == SEQUENCES


def test_a_missing_file_is_named(tmp_path):
    prefix = write(tmp_path, *files(SEQUENCES, DOCUMENTS))
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data\.bin"):
        IndexedDataset(prefix)


def test_a_long_index_is_checked_where_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "CHECKED_ON_OPEN", 2)
    index, tokens = files(SEQUENCES, DOCUMENTS)
    prefix = write(tmp_path, index[:66] + b"\x08" + index[67:], tokens)
    dataset = IndexedDataset(prefix)  # sees both ends only
    assert dataset[0].tolist() == [1, 2, 3]
    for read in (lambda: dataset[2], lambda: dataset[1], dataset.verify):
        with pytest.raises(ValueError, match="must"):
            read()


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_verify_in_pieces_sees_faults_at_their_borders(tmp_path, monkeypatch, piece):
    index, tokens = files(SEQUENCES, DOCUMENTS)
    sound = write(tmp_path, index, tokens)
    monkeypatch.setattr(indexed, "CHECKED_ON_OPEN", piece)
    monkeypatch.setattr(index_file, "CHECKED_ON_OPEN", piece)
    IndexedDataset(sound).verify()
    for fault in ("middle pointer", "length", "negative length", "documents not monotone"):
        damage, message = FAULTS[fault]
        with pytest.raises(ValueError) as caught:
            IndexedDataset(write(tmp_path, damage(index), tokens)).verify()
        assert message in str(caught.value)


def built(prefix, documents=((1, 2, 3), (), (4,)), **options):
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, **options) as builder:
        for document in documents:
            builder.add_document(list(document))
    return IndexedDataset(prefix)


def test_f_129_the_fingerprint_is_that_of_the_content(tmp_path):
    """Copies have one; other tokens, borders or dtypes have another, with a manifest or without."""
    first = built(tmp_path / "a").fingerprint
    assert built(tmp_path / "b").fingerprint == first
    others = [((1, 2, 3), (), (5,)), ((1, 2), (3,), (4,)), ((1, 2, 3), (), (4,), ())]
    found = [first]
    for number, documents in enumerate(others):
        found.append(built(tmp_path / f"other-{number}", documents).fingerprint)
    for path in tmp_path.glob("*.manifest.json"):
        path.unlink()
    plain = [IndexedDataset(tmp_path / "a").fingerprint]
    assert IndexedDataset(tmp_path / "b").fingerprint == plain[0]
    for number in range(len(others)):
        plain.append(IndexedDataset(tmp_path / f"other-{number}").fingerprint)
    assert len({*found, *plain}) == 2 * 4


def test_the_fingerprint_without_a_manifest_reads_a_little_of_a_large_file(tmp_path):
    """The two ends are always among it."""
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint8) as builder:
        builder.add_document(np.zeros(1 << 22, np.uint8))
    (tmp_path / "a.manifest.json").unlink()
    before = IndexedDataset(tmp_path / "a").fingerprint
    for place in (0, (1 << 22) - 1):
        with open(tmp_path / "a.bin", "r+b") as file:
            file.seek(place)
            file.write(b"\1")
        after = IndexedDataset(tmp_path / "a").fingerprint
        assert after != before
        before = after


@pytest.mark.parametrize(
    "replaced",
    [((1, 2, 3),), ((1, 2, 3), (), (4, 5)), ((1, 2), (), (4,), (5,))],
)
def test_f_129_a_manifest_of_other_files_is_refused(tmp_path, replaced):
    """As when another tool replaces the two files."""
    built(tmp_path / "a")
    built(tmp_path / "b", replaced)
    for ending in (".idx", ".bin"):
        (tmp_path / f"b{ending}").replace(tmp_path / f"a{ending}")
    with pytest.raises(ValueError, match=r"a\.manifest\.json: says .* remove it if another tool"):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.manifest.json").unlink()
    assert [x.tolist() for x in IndexedDataset(tmp_path / "a")] == [list(x) for x in replaced]


def test_verify_finds_files_of_equal_sizes_that_another_tool_wrote(tmp_path):
    built(tmp_path / "a")
    built(tmp_path / "b", ((1, 2, 3), (), (5,)))
    (tmp_path / "b.bin").replace(tmp_path / "a.bin")
    dataset = IndexedDataset(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a\.bin: holds 8 bytes of xxh3-128 .* must hold 8 of"):
        dataset.verify()


def test_a_damaged_manifest_is_refused(tmp_path):
    built(tmp_path / "a")
    path = tmp_path / "a.manifest.json"
    path.write_bytes(path.read_bytes().replace(b"uint16", b"uint18"))
    with pytest.raises(ValueError, match=r"a\.manifest\.json: is no manifest"):
        IndexedDataset(tmp_path / "a")


def test_verify_finds_every_flipped_bit_by_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "HASHED_AT_A_TIME", 3)
    built(tmp_path / "a").verify()
    for ending in (".idx", ".bin", ".hashes"):
        path = tmp_path / f"a{ending}"
        sound = path.read_bytes()
        for bit in range(8 * len(sound)):
            changed = bytearray(sound)
            changed[bit // 8] ^= 1 << bit % 8
            put(path, changed)
            with pytest.raises(ValueError, match=r"/a\."):
                IndexedDataset(tmp_path / "a").verify()
        put(path, sound)
    IndexedDataset(tmp_path / "a").verify()


def mutated(draw, pair, other):
    """A pair of files with something wrong, most of the time."""
    files = [bytearray(data) for data in pair]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        kind, which = (
            draw.choice(["cut", "longer", "flip", "run", "swap", "move"]),
            draw.choice([0, 1]),
        )
        data = files[which]
        start = draw.randrange(len(data) + 1)
        if kind == "cut":
            del data[start:]
        elif kind == "longer":
            data += draw.randbytes(draw.choice([1, 2, 4, 8, 100]))
        elif kind == "flip" and data:
            data[start % len(data)] ^= 1 << draw.randrange(8)
        elif kind == "run":
            length = draw.choice([1, 4, 8])
            data[start : start + length] = draw.choice([bytes(length), b"\xff" * length])
        elif kind == "swap":
            files[which] = bytearray(other[which])
        elif kind == "move":
            del data[start : start + draw.choice([1, 2, 4, 8])]
    return [bytes(data) for data in files]


def random_pair(draw):
    lengths = [draw.choice([0, 1, 1, 2, 5]) for _ in range(draw.randrange(8))]
    code = draw.choice([1, 3, 4, 5, 8])
    cuts = sorted(draw.randrange(len(lengths) + 1) for _ in range(draw.randrange(4)))
    sequences = [[draw.randrange(100) for _ in range(n)] for n in lengths]
    modes = bytes(len(lengths)) if draw.random() < 0.3 else b""
    return files(sequences, [0, *cuts, len(lengths)], code=code, modes=modes)


@pytest.mark.parametrize(
    "number", [400, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_f_107_mutated_pairs_are_refused_by_name_or_read_right(tmp_path, monkeypatch, number):
    """What is accepted lies end to end in the token file, document by document, to its last byte.

    Every other pair is opened as a long index is, which is checked where it is read.
    """
    draw, outcomes = random.Random(number), []
    prefix = tmp_path / "data"
    for round_ in range(number):
        monkeypatch.setattr(indexed, "CHECKED_ON_OPEN", 1 << 20 if round_ % 2 else -1)
        index, tokens = mutated(draw, random_pair(draw), random_pair(draw))
        write(tmp_path, index, tokens)
        try:
            dataset = IndexedDataset(prefix)
            parts = [x.tobytes() for x in dataset]
            dataset.verify()
        except ValueError as error:
            assert str(prefix) in str(error)
            outcomes.append("refused")
            continue
        assert b"".join(parts) == tokens
        assert [len(part) for part in parts] == (
            dataset.sequence_lengths * dataset.dtype.itemsize
        ).tolist()
        bounds = dataset.document_indices.tolist()
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, len(dataset))
        outcomes.append("read")
    assert 0.5 < outcomes.count("refused") / number < 0.98


@pytest.mark.parametrize(
    "number", [100, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_with_a_manifest_every_mutation_of_a_pair_is_found(tmp_path, number):
    draw = random.Random(number)
    built(tmp_path / "data", ((1, 2, 3), (), (4,), (5, 6)), multimodal=True)
    pair = [(tmp_path / f"data{ending}").read_bytes() for ending in (".idx", ".bin")]
    for _ in range(number):
        changed = mutated(draw, pair, random_pair(draw))
        if changed == pair:
            continue
        write(tmp_path, *changed)
        with pytest.raises(ValueError, match=r"/data\."):
            IndexedDataset(tmp_path / "data").verify()


@pytest.mark.parametrize("by_us", [True, False])
def test_what_was_replaced_is_not_unpickled_as_the_same(tmp_path, by_us):
    """A worker process that starts late would read other tokens in the order of the old ones."""
    built(tmp_path / "a")
    pickled = pickle.dumps(IndexedDataset(tmp_path / "a"))
    for ending in () if by_us else (".manifest.json", ".hashes"):
        (tmp_path / f"a{ending}").unlink()
    assert len(pickle.loads(pickled)) == 3  # copies without a manifest are the same
    # Ours are known by their build, those of another tool by their sizes.
    built(tmp_path / "a", ((9, 9, 9), (), (9,) if by_us else (9, 9)), overwrite=True)
    if not by_us:
        (tmp_path / "a.manifest.json").unlink()
    with pytest.raises(ValueError, match="a: was replaced since the dataset was opened"):
        pickle.loads(pickled)


def test_a_relative_prefix_means_the_same_after_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    builder = IndexedDatasetBuilder("a", dtype=np.uint16)
    builder.add_document([1, 2])
    monkeypatch.chdir(tmp_path / "other")
    builder.finish()
    assert not list((tmp_path / "other").iterdir())
    monkeypatch.chdir(tmp_path)
    dataset = IndexedDataset("a")
    monkeypatch.chdir(tmp_path / "other")
    dataset.verify()
    assert pickle.loads(pickle.dumps(dataset))[0].tolist() == [1, 2]


def test_ids_outside_a_vocabulary_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "HASHED_AT_A_TIME", 3)
    dataset = built(tmp_path / "a", ((1, 2, 3), (), (4, 299, 7)))
    dataset.verify(300)
    with pytest.raises(ValueError, match=r"a\.bin: token 4 is 299, must be an id from 0 to 298"):
        dataset.verify(vocab_size=299)
    with IndexedDatasetBuilder(tmp_path / "b", dtype=np.int16) as builder:
        builder.add_document([5, -1])
    with pytest.raises(ValueError, match="token 1 is -1"):
        IndexedDataset(tmp_path / "b").verify(vocab_size=299)
    with pytest.raises(ValueError, match="vocab_size=0 must be"):
        dataset.verify(0)
