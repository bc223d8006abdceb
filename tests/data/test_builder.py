"""The writer's bytes are the format's, ids never wrap, and half a dataset never shows."""

import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, builder, smallest_dtype

FILES = ["a.bin", "a.hashes", "a.idx", "a.manifest.json"]

# In the order of their codes, 1 to 8.
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


def test_writes_the_bytes_of_the_format(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16) as builder:
        builder.add_item([1, 2])
        builder.end_document()
        builder.add_item([515])
        builder.end_document()
    index = (
        b"MMIDIDX\0\0"  # magic
        b"\1\0\0\0\0\0\0\0"  # version
        b"\x08"  # uint16
        b"\2\0\0\0\0\0\0\0"  # sequences
        b"\3\0\0\0\0\0\0\0"  # document indices
        b"\2\0\0\0\1\0\0\0"  # lengths
        b"\0\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0"  # pointers
        b"\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0"  # document indices
    )
    assert len(index) == 82
    assert (tmp_path / "a.idx").read_bytes() == index
    assert (tmp_path / "a.bin").read_bytes() == b"\1\0\2\0\3\2"
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES


@given(
    documents=st.lists(st.lists(st.lists(st.integers(-128, 127), max_size=4), max_size=4)),
    dtype=st.sampled_from(["int8", "int16", "int32", "int64", "float32", "float64"]),
)
def test_round_trip(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("d") / "a"
    with IndexedDatasetBuilder(prefix, dtype=dtype) as builder:
        for i, document in enumerate(documents):
            if i % 2:
                whole = np.array(sum(document, []), dtype)
                builder.add_document(whole, [len(part) for part in document])
            else:
                for part in document:
                    builder.add_item(np.array(part, dtype))
                builder.end_document()
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    assert dataset.dtype == dtype
    assert [
        [part.tolist() for part in dataset[first:last]]
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ] == documents


def test_takes_lists_arrays_and_tensors_of_any_layout(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as builder:
        builder.add_document(range(3))
        builder.add_document(np.arange(6)[::-2])
        builder.add_document(torch.tensor([7, 8]))
        builder.add_document(np.arange(3, dtype=">i8"))
    read = [x.tolist() for x in IndexedDataset(tmp_path / "a")]
    assert read == [[0, 1, 2], [5, 3, 1], [7, 8], [0, 1, 2]]


def test_long_sequences_are_converted_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "PIECE", 7)
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16) as writer:
        writer.add_document(np.arange(100))
    assert IndexedDataset(tmp_path / "a")[0].tolist() == list(range(100))


def test_f_109_merging_keeps_document_borders(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as builder:
        builder.add_document([1], [1])
        builder.add_document([2, 3, 4], [1, 2])
    with IndexedDatasetBuilder(tmp_path / "b", dtype=np.int32) as builder:
        builder.add_document([5, 6, 7], [2, 1])
    with IndexedDatasetBuilder(tmp_path / "c", dtype=np.int32) as builder:
        builder.add_index(tmp_path / "a")
        builder.add_index(tmp_path / "b")
    merged = IndexedDataset(tmp_path / "c")
    assert merged.sequence_lengths.tolist() == [1, 1, 2, 2, 1]
    assert merged.document_indices.tolist() == [0, 1, 3, 5]
    assert merged.document_indices[-1] == len(merged)
    assert [x.tolist() for x in merged] == [[1], [2], [3, 4], [5, 6], [7]]


def test_f_110_datasets_of_two_dtypes_merge_by_value_or_not_at_all(tmp_path):
    for name, dtype, ids in (("a", np.uint16, [1, 65535]), ("b", np.int32, [2, 65536])):
        with IndexedDatasetBuilder(tmp_path / name, dtype=dtype) as builder:
            builder.add_document(ids)
    with IndexedDatasetBuilder(tmp_path / "wide", dtype=np.int32) as builder:
        builder.add_index(tmp_path / "a")
        builder.add_index(tmp_path / "b")
    assert [x.tolist() for x in IndexedDataset(tmp_path / "wide")] == [[1, 65535], [2, 65536]]

    with IndexedDatasetBuilder(tmp_path / "narrow", dtype=np.uint16) as builder:
        builder.add_index(tmp_path / "a")
        with pytest.raises(ValueError, match="65536 .given as int32.*stored as uint16"):
            builder.add_index(tmp_path / "b")
    assert [x.tolist() for x in IndexedDataset(tmp_path / "narrow")] == [[1, 65535]]


@pytest.mark.parametrize("code", range(1, 9))
def test_f_110_all_dtype_codes_round_trip(tmp_path, code):
    dtype = np.dtype(DTYPES[code - 1])
    ids = [0, 1, 127]
    with IndexedDatasetBuilder(tmp_path / "a", dtype=dtype) as builder:
        builder.add_document(np.array(ids, dtype))
    with IndexedDatasetBuilder(tmp_path / "b", dtype=dtype) as builder:
        builder.add_index(tmp_path / "a")
    assert (tmp_path / "b.idx").read_bytes()[17] == code
    assert (tmp_path / "b.bin").read_bytes() == np.array(ids, dtype).tobytes()
    assert IndexedDataset(tmp_path / "b").dtype == dtype


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, "uint8"),
        (256, "uint8"),
        (257, "uint16"),
        (65499, "uint16"),
        (65500, "uint16"),
        (65536, "uint16"),
        (65537, "int32"),
        (2**31, "int32"),
        (2**31 + 1, "int64"),
    ],
)
def test_f_111_the_smallest_dtype_holds_every_id(vocab_size, dtype):
    assert smallest_dtype(vocab_size).name == dtype
    assert vocab_size - 1 <= np.iinfo(dtype).max


@pytest.mark.parametrize("vocab_size", [0, -1, 2**63 + 1])
def test_no_dtype_for_an_impossible_vocabulary(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} must be"):
        smallest_dtype(vocab_size)


@pytest.mark.parametrize("token", [70000, 65536, -1])
@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_f_111_an_id_that_does_not_fit_raises(tmp_path, token, container):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16) as builder:
        builder.add_document([1, 65535])
        with pytest.raises(ValueError, match=f"token id {token} .*must be between 0 and 65535"):
            builder.add_document(container([2, token, 3]))
        builder.add_document([4])
    assert [x.tolist() for x in IndexedDataset(tmp_path / "a")] == [[1, 65535], [4]]


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        ("int32", [1.0, 2.5]),
        ("int32", ["a"]),
        ("int64", [2**63, 1]),
        ("int64", np.array([2**63], np.uint64)),
        ("int64", [2**70]),
        ("float32", np.array([0.1])),
        ("float32", [2**24 + 1]),
        ("uint16", [[1, 2]]),
        ("uint16", 5),
    ],
)
def test_tokens_that_are_not_a_row_of_fitting_numbers_raise(tmp_path, dtype, tokens):
    with (
        IndexedDatasetBuilder(tmp_path / "a", dtype=dtype) as builder,
        pytest.raises(ValueError, match="token.* must "),
    ):
        builder.add_item(tokens)
    assert len(IndexedDataset(tmp_path / "a")) == 0


def test_f_112_a_sequence_longer_than_the_format_holds_is_refused(tmp_path):
    tokens = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**31,), (0,))  # 1 byte
    with (
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint8) as writer,
        pytest.raises(ValueError, match="sequence of 2147483648 tokens must have at most"),
    ):
        writer.add_item(tokens)


@pytest.mark.parametrize("lengths", [[2], [2, 2], [4, -1], []])
def test_lengths_must_sum_to_the_tokens(tmp_path, lengths):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer:
        with pytest.raises(ValueError, match="sum to the 3 tokens"):
            writer.add_document([1, 2, 3], lengths)
        writer.add_document([4])
    assert [x.tolist() for x in IndexedDataset(tmp_path / "a")] == [[4]]


def test_sequences_outside_documents_are_refused(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "other", dtype=np.int32) as writer:
        writer.add_document([1])
    writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    writer.add_item([1])
    with pytest.raises(ValueError, match=r"1 sequences must be closed .* before finish"):
        writer.finish()
    with pytest.raises(ValueError, match=r"1 sequences must be closed .* before add_index"):
        writer.add_index(tmp_path / "other")
    writer.end_document()
    writer.finish()
    assert len(IndexedDataset(tmp_path / "a")) == 1


def test_modes_are_kept(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, multimodal=True) as writer:
        writer.add_item([1], 3)
        writer.add_item([2])
        writer.end_document()
        writer.add_document([4, 5, 6], [1, 2], [-128, 127])
    with IndexedDatasetBuilder(tmp_path / "plain", dtype=np.int32) as writer:
        writer.add_document([7], [1])
    with IndexedDatasetBuilder(tmp_path / "both", dtype=np.int32, multimodal=True) as writer:
        writer.add_index(tmp_path / "a")
        writer.add_index(tmp_path / "plain")
    for name, modes in (("a", [3, 0, -128, 127]), ("both", [3, 0, -128, 127, 0])):
        dataset = IndexedDataset(tmp_path / name)
        assert dataset.sequence_modes.dtype == np.int8
        assert dataset.sequence_modes.tolist() == modes
        dataset.verify()


def test_modes_are_not_dropped_in_silence(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, multimodal=True) as writer:
        writer.add_document([1])
    with IndexedDatasetBuilder(tmp_path / "b", dtype=np.int32) as writer:
        with pytest.raises(ValueError, match="has modes, which needs multimodal=True"):
            writer.add_index(tmp_path / "a")
        with pytest.raises(ValueError, match="mode=1 needs multimodal=True"):
            writer.add_item([1], 1)
    assert len(IndexedDataset(tmp_path / "b")) == 0


@pytest.mark.parametrize(
    ("modes", "message"),
    [([1], "one for each of the 2"), ([0, 128], "mode=128 must be"), ([-129, 0], "mode=-129")],
)
def test_modes_that_do_not_fit_are_refused(tmp_path, modes, message):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, multimodal=True) as writer:
        with pytest.raises(ValueError, match=message):
            writer.add_document([1, 2, 3], [1, 2], modes)
        writer.add_document([4], modes=[1])
    assert IndexedDataset(tmp_path / "a").sequence_modes.tolist() == [1]


def test_a_foreign_file_with_modes_is_told_by_its_size(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer:
        writer.add_document([1])
    (tmp_path / "a.manifest.json").unlink()
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(b"\1")
    assert IndexedDataset(tmp_path / "a").sequence_modes.tolist() == [1]


def test_append_begins_with_what_stands_there(tmp_path):
    for append, document in ((False, [1, 2]), (True, [3]), (True, [4, 5])):
        with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, append=append) as writer:
            writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "a")
    dataset.verify()
    assert [x.tolist() for x in dataset] == [[1, 2], [3], [4, 5]]
    with IndexedDatasetBuilder(tmp_path / "once", dtype=np.int32) as writer:
        for document in ([1, 2], [3], [4, 5]):
            writer.add_document(document)
    for ending in (".bin", ".idx", ".hashes"):
        grown, once = ((tmp_path / f"{name}{ending}").read_bytes() for name in ("a", "once"))
        assert grown == once


def test_append_to_nothing_or_with_overwrite_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="a.idx"):
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, append=True)
    with pytest.raises(ValueError, match="must not be given together"):
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, append=True, overwrite=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ours_appends", [False, True])
def test_nothing_is_lost_between_two_that_append(tmp_path, ours_appends):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer:
        writer.add_document([1])
    slow = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, append=True)
    slow.add_document([2])
    other = {"append": True} if ours_appends else {"overwrite": True}
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, **other) as writer:
        writer.add_document([3])
    with pytest.raises(RuntimeError, match="was replaced by another builder"):
        slow.finish()
    expected = [[1], [3]] if ours_appends else [[3]]
    assert [x.tolist() for x in IndexedDataset(tmp_path / "a")] == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES


def test_the_manifest_says_what_was_built(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype="u2", tokenizer="bytes-257") as writer:
        writer.add_document([1, 2, 3], [1, 2])
        writer.add_document([])
    manifest = IndexedDataset(tmp_path / "a").manifest
    assert (manifest.dtype, manifest.tokenizer) == ("uint16", "bytes-257")
    assert (manifest.num_sequences, manifest.num_documents, manifest.num_tokens) == (3, 2, 3)
    for ending, record in manifest.files.items():
        data = (tmp_path / f"a{ending}").read_bytes()
        assert record == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert set(manifest.files) == {".bin", ".idx", ".hashes"}


def test_datasets_of_two_tokenizers_do_not_merge(tmp_path):
    for name, tokenizer in (("a", "one"), ("b", "two"), ("c", None)):
        with IndexedDatasetBuilder(tmp_path / name, "u2", tokenizer=tokenizer) as writer:
            writer.add_document([1])
    with IndexedDatasetBuilder(tmp_path / "d", "u2") as writer:
        writer.add_index(tmp_path / "c")
        writer.add_index(tmp_path / "a")
        with pytest.raises(ValueError, match="tokenizer 'two' must be 'one'"):
            writer.add_index(tmp_path / "b")
    merged = IndexedDataset(tmp_path / "d")
    assert (len(merged), merged.manifest.tokenizer) == (2, "one")


def test_a_url_is_not_written_to():
    with pytest.raises(ValueError, match="must be on this machine"):
        IndexedDatasetBuilder("memory://a", dtype="u2")


def test_content_hashes_are_those_of_the_ids(tmp_path):
    documents = [[1, 2, 3], [], [1, 2, 3], [300], [2**31]]
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.uint16) as writer:
        writer.add_item([1])
        writer.add_item([2, 3])
        writer.end_document()
        for document in documents[1:4]:
            writer.add_document(document)
    with IndexedDatasetBuilder(tmp_path / "wide", dtype=np.int64) as writer:
        writer.add_index(tmp_path / "a")
        writer.add_document(documents[4])
    expected = [
        xxhash.xxh3_64_intdigest(np.array(document, "<i8").tobytes()) for document in documents
    ]
    assert IndexedDataset(tmp_path / "a").content_hashes().tolist() == expected[:4]
    for name in ("a", "wide"):  # another tool's files: hashed when they are merged
        (tmp_path / f"{name}.manifest.json").unlink()
        assert IndexedDataset(tmp_path / name).content_hashes() is None
    with IndexedDatasetBuilder(tmp_path / "again", dtype=np.int64) as writer:
        writer.add_index(tmp_path / "wide")
    assert IndexedDataset(tmp_path / "again").content_hashes().tolist() == expected


@pytest.mark.parametrize("reads", ["u2", "f8"])
def test_hashes_of_merged_floats_are_those_of_added_ones(tmp_path, reads):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=reads) as writer:
        writer.add_document(np.array([1, 2], reads))
    for name, add in (("merged", "add_index"), ("added", "add_document")):
        with IndexedDatasetBuilder(tmp_path / name, dtype="f8") as writer:
            getattr(writer, add)(tmp_path / "a" if add == "add_index" else np.array([1.0, 2.0]))
    hashes = [IndexedDataset(tmp_path / name).content_hashes() for name in ("merged", "added")]
    assert hashes[0] == hashes[1]


def test_a_dtype_outside_the_format_is_refused(tmp_path):
    for dtype in (np.uint32, np.complex64, bool):
        with pytest.raises(ValueError, match="must be one of uint8, int8"):
            IndexedDatasetBuilder(tmp_path / "a", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_what_exists_is_not_overwritten(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=f"a{suffix} exists"):
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    assert [p.name for p in tmp_path.iterdir()] == [f"a{suffix}"]
    assert (tmp_path / f"a{suffix}").read_bytes() == b"precious"


def test_overwrite_replaces_and_can_extend_what_it_replaces(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer:
        writer.add_document([1, 2])
    old = IndexedDataset(tmp_path / "a")
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32, overwrite=True) as writer:
        writer.add_index(tmp_path / "a")
        writer.add_document([3])
    assert [x.tolist() for x in IndexedDataset(tmp_path / "a")] == [[1, 2], [3]]
    assert old[0].tolist() == [1, 2]  # an open reader keeps the old files


def test_an_exception_publishes_nothing_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(RuntimeError, match="stop"),
        IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer,
    ):
        writer.add_document([1])
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_builder_leaves_nothing(tmp_path):
    writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    writer.add_document([1])
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    assert list(tmp_path.iterdir()) == []


def test_a_finished_builder_takes_nothing_more(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32) as writer:
        writer.add_document([1])
        writer.finish()  # the end of the block then has nothing to do
    for late in (lambda: writer.add_document([2]), lambda: writer.add_item([2]), writer.finish):
        with pytest.raises(ValueError, match="is finished or discarded"):
            late()
    assert len(IndexedDataset(tmp_path / "a")) == 1


def test_a_failed_write_discards_everything(tmp_path):
    writer = IndexedDatasetBuilder(tmp_path / "a", dtype=np.int32)
    os.close(writer._tokens.file.fileno())  # the next flush fails as on a full disk
    with pytest.raises(OSError):  # noqa: PT011
        writer.add_document(np.arange(1 << 20))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is finished or discarded"):
        writer.add_document([1])


def same_bytes(folder, ours, theirs):
    for ending in (".bin", ".idx"):
        assert (folder / f"{ours}{ending}").read_bytes() == (
            folder / f"{theirs}{ending}"
        ).read_bytes()


@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_megatron_and_each_reads_the_other(dtype, multimodal, tmp_path):
    """Written sequence by sequence or document by document, grown, and merged."""
    peers = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="oracle megatron")
    generator, dtype = np.random.default_rng(0), np.dtype(dtype).type
    documents = [
        [generator.integers(0, 128, size=n).astype(dtype) for n in lengths]
        for lengths in ([3, 1], [7], [0, 2, 5], [])
    ]

    def modes_of(document):
        return [len(sequence) % 5 for sequence in document] if multimodal else [0] * len(document)

    def theirs(name):
        return peers.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype, multimodal)

    def finish(builder, name):
        builder.finalize(str(tmp_path / f"{name}.idx"))

    # Sequence by sequence.
    builder = theirs("theirs")
    with IndexedDatasetBuilder(tmp_path / "ours", dtype, multimodal=multimodal) as ours:
        for document in documents:
            for sequence, mode in zip(document, modes_of(document), strict=True):
                builder.add_item(torch.from_numpy(sequence), mode)
                ours.add_item(sequence, mode)
            builder.end_document()
            ours.end_document()
    finish(builder, "theirs")
    same_bytes(tmp_path, "ours", "theirs")

    # Document by document, ours in two goes.
    builder = theirs("whole")
    for document in documents:
        tokens = np.concatenate([np.zeros(0, dtype), *document])
        lengths = [len(sequence) for sequence in document]
        builder.add_document(tokens, lengths, modes_of(document))
        with IndexedDatasetBuilder(
            tmp_path / "grown", dtype, append=len(lengths) != 2, multimodal=multimodal
        ) as ours:
            ours.add_document(tokens, lengths, modes_of(document))
    finish(builder, "whole")
    same_bytes(tmp_path, "grown", "whole")
    same_bytes(tmp_path, "grown", "ours")

    # Merged, each from files of the other.
    builder = theirs("their_merge")
    with IndexedDatasetBuilder(tmp_path / "merge", dtype, multimodal=multimodal) as merge:
        for name in ("theirs", "ours", "whole"):
            merge.add_index(tmp_path / name)
            builder.add_index(str(tmp_path / name))
    finish(builder, "their_merge")
    same_bytes(tmp_path, "merge", "their_merge")

    read = (
        IndexedDataset(tmp_path / "theirs"),
        peers.IndexedDataset(str(tmp_path / "ours"), multimodal=multimodal),
    )
    for index, sequence in enumerate(s for document in documents for s in document):
        mode = len(sequence) % 5
        assert np.array_equal(read[0][index], sequence)
        given = read[1][index]
        assert np.array_equal(given[0] if multimodal else given, sequence)
        if multimodal:
            assert read[0].sequence_modes[index] == given[1] == mode
    assert np.array_equal(read[0].document_indices, read[1].document_indices)
    assert (read[0].sequence_modes is None) != multimodal
