"""Splits hold every document once, equal ones together, whatever their order."""

import os
import signal

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, split_by_content
from megablocks_core.data.publish import Staging
from megablocks_core.data.tools import DamagedDataset, check, inspect, split

from .conftest import build, contents, in_a_child, names


@pytest.fixture
def documents():
    draw = np.random.default_rng(0)
    return [draw.integers(0, 9, n).tolist() for n in draw.integers(0, 5, 600)]


def test_every_document_is_in_one_split_as_it_was(tmp_path, documents, monkeypatch):
    monkeypatch.setattr("megablocks_core.data.tools.splitting.DOCUMENTS", 50)
    prefix = build(tmp_path / "a", documents, tokenizer="t")
    written = split(prefix, tmp_path / "s", fractions="0.8,0.2", seed=4, names=["train", "valid"])
    assert [one.prefix for one in written] == [str(tmp_path / f"s-{n}") for n in ("train", "valid")]
    found = {one.name: contents(one.prefix) for one in written}
    splits = split_by_content(IndexedDataset(prefix), "8,2", names=("train", "valid"), seed=4)
    for one in written:
        assert found[one.name] == [documents[d] for d in splits[one.name].documents]
        assert (one.documents, one.tokens) == (
            len(found[one.name]),
            sum(map(len, found[one.name])),
        )
    assert sum(one.documents for one in written) == 600
    assert 60 < written[1].documents < 180
    train, valid = (one.prefix for one in written)
    assert not check([train], against=[valid]).datasets[0].overlap
    built = IndexedDataset(train)
    assert (built.dtype, built.manifest.tokenizer) == (np.uint16, "t")
    source = inspect(train).source
    assert (source["seed"], source["fractions"], source["by"]) == (4, [0.8, 0.2], "document")


def test_a_split_does_not_depend_on_order_or_dtype_but_on_the_seed(tmp_path, documents):
    shuffled = [documents[n] for n in np.random.default_rng(1).permutation(600)]
    one = build(tmp_path / "a", documents)
    other = build(tmp_path / "b", shuffled, np.int32)
    for prefix, out in ((one, "x"), (other, "y")):
        split(prefix, tmp_path / out, fractions=[1, 1], seed=7)
    split(one, tmp_path / "z", fractions=[1, 1], seed=8)
    sets = {out: set(map(tuple, contents(tmp_path / f"{out}-0"))) for out in "xyz"}
    assert sets["x"] == sets["y"] != sets["z"]


def test_by_place(tmp_path, documents):
    prefix = build(tmp_path / "a", documents)
    split(prefix, tmp_path / "s", fractions="2,1", by="place")
    assert contents(tmp_path / "s-0") == documents[:400]
    assert contents(tmp_path / "s-1") == documents[400:]


def test_sequences_and_modes_stay(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", dtype=np.int64, multimodal=True) as builder:
        builder.add_document([1, 2, 3], lengths=[2, 1], modes=[0, 5])
        builder.add_document([], lengths=[])
        builder.add_document([4], modes=[6])
    split(tmp_path / "a", tmp_path / "s", fractions="1,0", by="place")
    whole, copy = IndexedDataset(tmp_path / "a"), IndexedDataset(tmp_path / "s-0")
    for ending in (".bin", ".idx", ".hashes"):
        assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"s-0{ending}").read_bytes()
    assert copy.sequence_modes.tolist() == whole.sequence_modes.tolist() == [0, 5, 6]
    assert contents(tmp_path / "s-1") == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fractions": "1,1", "by": "x"}, "by='x' must be one of document, place"),
        ({"fractions": "1,x"}, "^fractions='1,x' must be several numbers"),
        ({"fractions": "1,-1"}, "^fractions='1,-1' must be 0 or more"),
        ({"fractions": 0.9}, "fractions=0.9 must be several"),
        ({"fractions": "1,1", "names": ["a"]}, r"names=\['a'\] must be one for each of the 2"),
        ({"fractions": "1,1", "names": ["a", "a"]}, "no two of them equal"),
        ({"fractions": "1,1", "seed": -1}, "seed=-1 must be"),
    ],
)
def test_arguments(tmp_path, given, message):
    build(tmp_path / "a", [[1]])
    before = names(tmp_path)
    with pytest.raises(ValueError, match=message):
        split(tmp_path / "a", tmp_path / "s", **given)
    assert names(tmp_path) == before


def test_the_input_and_what_stands_there_stay(tmp_path, documents):
    prefix = build(tmp_path / "a-0", documents)
    with pytest.raises(ValueError, match="must not be an input"):
        split(prefix, tmp_path / "a", fractions="1,1", overwrite=True)
    build(tmp_path / "s-1", [[5]])
    with pytest.raises(FileExistsError):
        split(prefix, tmp_path / "s", fractions="1,1")
    assert not (tmp_path / "s-0.idx").exists() and contents(tmp_path / "s-1") == [[5]]
    split(prefix, tmp_path / "s", fractions="1,1", overwrite=True)
    assert len(contents(tmp_path / "s-0")) + len(contents(tmp_path / "s-1")) == 600


def test_a_damaged_dataset(tmp_path):
    build(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(DamagedDataset):
        split(tmp_path / "a", tmp_path / "s", fractions="1,1")


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_leaves_no_split_that_is_not_whole(tmp_path, documents, monkeypatch, at):
    prefix = build(tmp_path / "a", documents)
    calls, real = [], Staging.publish

    def publish(self, *arguments, **options):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments, **options)

    given = {"fractions": "1,1", "names": ["train", "valid"]}
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", publish)
        assert in_a_child(lambda: split(prefix, tmp_path / "s", **given)) == -signal.SIGKILL
    whole = [name for name in ("train", "valid") if (tmp_path / f"s-{name}.idx").exists()]
    assert len(whole) == at - 1
    left = {name: contents(tmp_path / f"s-{name}") for name in whole}
    split(prefix, tmp_path / "s", **given, overwrite=True)
    for name in whole:
        assert contents(tmp_path / f"s-{name}") == left[name]
    assert not [name for name in names(tmp_path) if ".tmp" in name]
