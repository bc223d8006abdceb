"""Splits by content: equal documents together, none moves, and what is kept fits or is not used."""

import os
import shutil
import signal

import numpy as np
import pytest

from megablocks_core.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    content,
    split_by_content,
)

WEIGHTS = "8,1,1"


def build(prefix, documents, dtype=np.uint16, **options):
    with IndexedDatasetBuilder(prefix, dtype=dtype, **options) as builder:
        for document in documents:
            builder.add_document(document)
    return IndexedDataset(prefix)


def texts_of(dataset, split):
    """The documents of a split, as tuples of ids."""
    starts = [dataset.document_start(d) for d in range(dataset.num_documents + 1)]
    return [tuple(dataset.tokens[starts[d] : starts[d + 1]].tolist()) for d in split.documents]


@pytest.fixture
def documents():
    generator = np.random.default_rng(0)
    return [generator.integers(0, 50, n).tolist() for n in generator.integers(0, 4, 3000)]


def test_every_document_is_in_one_split_and_equal_ones_in_the_same(tmp_path, documents):
    dataset = build(tmp_path / "a", documents)
    splits = split_by_content(dataset, WEIGHTS, seed=3)
    assert list(splits) == ["train", "valid", "test"]
    whole = np.concatenate([split.documents for split in splits.values()])
    assert np.array_equal(np.sort(whole), np.arange(3000))
    sets = [set(texts_of(dataset, split)) for split in splits.values()]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    for split in splits.values():
        assert np.asarray(split.documents).dtype == split.offsets.dtype == np.int64
        assert (np.diff(split.documents) > 0).all()
        sizes = [len(text) for text in texts_of(dataset, split)]
        assert split.offsets.tolist() == [0, *np.cumsum(sizes)]


def test_no_document_moves_when_the_corpus_grows_is_shuffled_or_changes_its_dtype(
    tmp_path, documents
):
    small = build(tmp_path / "small", documents[:500])
    before = {
        text: name
        for name, split in split_by_content(small, WEIGHTS).items()
        for text in texts_of(small, split)
    }
    order = np.random.default_rng(1).permutation(3000)
    large = build(tmp_path / "large", [documents[i] for i in order], np.int64)
    after = {
        text: name
        for name, split in split_by_content(large, WEIGHTS).items()
        for text in texts_of(large, split)
    }
    assert before == {text: after[text] for text in before}


def test_shares_are_those_of_the_weights_and_seeds_are_independent(tmp_path):
    dataset = build(tmp_path / "a", [[i] for i in range(5000)])
    members = []
    for seed in range(8):
        splits = split_by_content(dataset, "9,1", names=("train", "valid"), seed=seed)
        chosen = np.zeros(5000)
        chosen[splits["valid"].documents] = 1
        assert abs(chosen.sum() - 500) < 4 * np.sqrt(5000 * 0.09)
        members.append(chosen)
    both = np.corrcoef(members) - np.eye(8)
    assert np.abs(both).max() < 4 / np.sqrt(5000)


def test_weights_that_round_badly_leave_no_document_out(tmp_path):
    dataset = build(tmp_path / "a", [[i] for i in range(2000)])
    names = tuple(map(str, range(10)))
    splits = split_by_content(dataset, [0.1] * 9, names=names)
    assert sum(len(split.documents) for split in splits.values()) == 2000
    assert len(splits["9"].documents) == 0
    assert {len(split.documents) for split in split_by_content(dataset, "1").values()} == {0, 2000}


def test_the_last_places_of_the_hash_space_belong_to_the_last_split(tmp_path, monkeypatch):
    """A sixth six times over is a little less than 1."""
    dataset = build(tmp_path / "a", [[1], [2]])
    monkeypatch.setattr(content, "_stirred", lambda x: np.full_like(x, 2**64 - 1))
    names = tuple(map(str, range(7)))
    splits = split_by_content(dataset, [1] * 6, names=names)
    assert [len(splits[name].documents) for name in names] == [0, 0, 0, 0, 0, 2, 0]


def test_samples_of_a_split_come_from_its_documents(tmp_path, documents):
    dataset = build(tmp_path / "a", documents)
    split = split_by_content(dataset, WEIGHTS)["valid"]
    stream = [token for text in texts_of(dataset, split) for token in text]
    samples = GPTDataset(dataset, 8, seed=0, split=split)
    assert len(samples) == (len(stream) - 1) // 8
    seen = sorted(samples[k]["tokens"].tolist() for k in range(len(samples)))
    assert seen == sorted(stream[8 * w : 8 * w + 8] for w in range(len(samples)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "1,x"}, "must be several numbers"),
        ({"weights": "0,0"}, "one above 0"),
        ({"weights": "1,1,1,1"}, "more than names"),
        ({"weights": "1", "seed": -1}, "seed=-1 must be"),
        ({"weights": "1", "seed": 2**64}, "seed=18446744073709551616 must be"),
        ({"weights": "1", "names": "all"}, "names='all' must be several"),
    ],
)
def test_what_makes_no_splits_is_refused(tmp_path, options, message):
    dataset = build(tmp_path / "a", [[1]])
    with pytest.raises(ValueError, match=message):
        split_by_content(dataset, **options)


def test_an_empty_dataset_has_empty_splits(tmp_path):
    for dataset in (build(tmp_path / "a", []), build(tmp_path / "b", [[], []])):
        splits = split_by_content(dataset, WEIGHTS).values()
        assert sum(len(split.documents) for split in splits) == dataset.num_documents
        assert all(split.offsets[-1] == 0 for split in splits)


def test_files_of_another_tool_are_hashed_and_nothing_is_kept(tmp_path, documents):
    ours = split_by_content(build(tmp_path / "a", documents), WEIGHTS)
    for ending in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{ending}", tmp_path / f"b{ending}")
    theirs = split_by_content(IndexedDataset(tmp_path / "b"), WEIGHTS)
    for name in ours:
        assert np.array_equal(ours[name].documents, theirs[name].documents)
    assert not list(tmp_path.glob("b.split*"))


def test_what_was_found_once_is_mapped_the_next_time(tmp_path, monkeypatch, documents):
    dataset = build(tmp_path / "a", documents)
    first = split_by_content(dataset, WEIGHTS)
    (kept,) = tmp_path.glob("a.split-*.npy")
    monkeypatch.setattr(content, "_assign", None)
    again = split_by_content(IndexedDataset(tmp_path / "a"), WEIGHTS)
    for name in first:
        assert np.array_equal(again[name].documents, first[name].documents)
        assert np.array_equal(again[name].offsets, first[name].offsets)
        assert type(again[name].documents) is np.ndarray


def test_f_129_what_is_kept_belongs_to_one_content_weights_and_seed(tmp_path, documents):
    """Equal base names in two folders, another content under one name, another recipe."""
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    x = build(tmp_path / "x" / "a", documents)
    y = build(tmp_path / "y" / "a", documents[::-1])
    split_by_content(x, WEIGHTS)
    split_by_content(y, WEIGHTS)
    keys = {path.name for path in tmp_path.glob("*/a.split-*.npy")}
    assert len(keys) == 2
    for options in ({"seed": 1}, {"names": ("train", "valid", "test", "more")}):
        split_by_content(x, WEIGHTS, **options)
    split_by_content(x, "8,2")
    assert len(list(tmp_path.glob("x/a.split-*.npy"))) == 4

    grown = build(tmp_path / "x" / "a", [[1, 2]], append=True)
    splits = split_by_content(grown, WEIGHTS)
    assert sum(len(split.documents) for split in splits.values()) == 3001
    assert len(list(tmp_path.glob("x/a.split-*.npy"))) == 5


def test_f_129_what_is_kept_under_the_wrong_name_is_not_used(tmp_path, documents):
    first = build(tmp_path / "a", documents)
    expected = split_by_content(first, WEIGHTS)
    (kept,) = tmp_path.glob("a.split-*.npy")
    build(tmp_path / "b", documents[:-1])
    split_by_content(IndexedDataset(tmp_path / "b"), WEIGHTS)
    (other,) = tmp_path.glob("b.split-*.npy")
    sound = kept.read_bytes()
    numbers = np.load(kept)
    for wrong in (
        other.read_bytes(),
        b"",
        sound[:100],
        sound[:-8],
        b"garbage" * 100,
        sound[: -8 * len(numbers)] + (numbers + 1).tobytes(),
        sound[:-8] + (numbers[-1:] + 1).tobytes(),
    ):
        kept.write_bytes(wrong)
        found = split_by_content(first, WEIGHTS)
        for name, split in expected.items():
            assert np.array_equal(found[name].documents, split.documents)
        assert kept.read_bytes() == sound


def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path, monkeypatch, documents):
    dataset = build(tmp_path / "a", documents)

    def refuse(path, data):
        raise PermissionError(path)

    monkeypatch.setattr(content, "replace_file", refuse)
    assert len(split_by_content(dataset, WEIGHTS)["train"].documents) > 2000
    assert not list(tmp_path.glob("*split*"))


def test_f_129_hashes_of_other_tokens_are_refused(tmp_path):
    """Another tool wrote files of equal sizes over ours: a few hashes are computed again."""
    build(tmp_path / "a", [[i, i] for i in range(100)])
    build(tmp_path / "b", [[i, i + 1] for i in range(100)])
    shutil.copy(tmp_path / "b.bin", tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"a\.hashes: says .* of document 0, must say"):
        split_by_content(IndexedDataset(tmp_path / "a"), WEIGHTS)


@pytest.mark.parametrize("damage", [lambda data: data[:-8], lambda data: b"\1" + data[1:]])
def test_damaged_hashes_are_refused(tmp_path, damage):
    dataset = build(tmp_path / "a", [[1], [2]])
    path = tmp_path / "a.hashes"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"a\.hashes: holds .* must hold"):
        split_by_content(dataset, WEIGHTS)


@pytest.mark.parametrize("repeats", [4, pytest.param(20, marks=pytest.mark.drill)])
def test_f_130_several_processes_find_the_same_and_a_killed_one_leaves_nothing(
    tmp_path, monkeypatch, documents, repeats
):
    dataset = build(tmp_path / "a", documents)
    expected = split_by_content(build(tmp_path / "b", documents), WEIGHTS)["valid"]
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for repeat in range(repeats):
        children = []
        for number in range(4):
            if not (child := os.fork()):
                found = split_by_content(dataset, WEIGHTS)["valid"]
                os._exit(0 if np.array_equal(found.documents, expected.documents) else 1)
            children.append(child)
            if number == repeat % 4:
                os.kill(child, signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(statuses) <= {0, -signal.SIGKILL}
        assert statuses.count(0) >= 3
        (kept,) = tmp_path.glob("a.split-*.npy")
        found = split_by_content(dataset, WEIGHTS)["valid"]
        assert np.array_equal(found.documents, expected.documents)
        assert np.array_equal(found.offsets, expected.offsets)
        kept.unlink()
