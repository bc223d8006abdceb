"""What is said of a dataset is what a plain count gives."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import IndexedDataset
from megablocks_core.data.tools import DamagedDataset, inspect
from megablocks_core.data.tools.inspecting import SOURCE, ids_of, lengths_of

from .conftest import build


def plain_quantile(lengths, percent):
    """The least length that so many in a hundred do not exceed."""
    return next(
        length
        for length in sorted(lengths)
        if sum(other <= length for other in lengths) * 100 >= percent * len(lengths)
    )


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=40))
def test_lengths_are_those_of_a_plain_count(tmp_path_factory, lengths):
    prefix = build(tmp_path_factory.mktemp("x") / "a", [[1] * length for length in lengths])
    found = lengths_of(IndexedDataset(prefix))
    assert (found.least, found.most) == (min(lengths), max(lengths))
    assert found.empty == lengths.count(0)
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))
    quantiles = {50: found.median, 90: found.p90, 99: found.p99}
    assert quantiles == {percent: plain_quantile(lengths, percent) for percent in quantiles}
    assert sum(one.documents for one in found.histogram) == len(lengths)
    for one in found.histogram:
        inside = [length for length in lengths if one.least <= length <= one.most]
        assert (one.documents, one.tokens) == (len(inside), sum(inside))
    assert found.histogram[0].documents and found.histogram[-1].documents


def test_blocks_add_up(tmp_path, monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 9, 50).tolist()
    dataset = IndexedDataset(build(tmp_path / "a", [[1] * length for length in lengths]))
    whole = lengths_of(dataset)
    monkeypatch.setattr(
        "megablocks_core.data.tools.inspecting.blocks.__kwdefaults__", {"documents": 7}
    )
    assert lengths_of(dataset) == whole


def test_ids_outside_a_vocabulary_are_counted(tmp_path, monkeypatch):
    prefix = build(tmp_path / "a", [[5, 9, 2], [], [9, -1]], np.int32)
    found = inspect(prefix, vocab_size=9)
    assert (found.documents, found.sequences, found.tokens, found.dtype) == (3, 3, 5, "int32")
    sizes = [(tmp_path / f"a{ending}").stat().st_size for ending in (".idx", ".bin")]
    assert found.bytes == sum(sizes)
    assert (found.ids.least, found.ids.most, found.ids.outside) == (-1, 9, 3)
    assert inspect(prefix, read_ids=False).ids is None
    monkeypatch.setattr("megablocks_core.data.tools.inspecting.TOKENS", 0.25)
    monkeypatch.setattr(
        "megablocks_core.data.tools.inspecting.pieces",
        lambda a, b, *, tokens: ((n, n + 1) for n in range(a, b)),
    )
    assert ids_of(IndexedDataset(prefix), 9) == found.ids
    with pytest.raises(ValueError, match="vocab_size=0 must be at least 1"):
        inspect(prefix, vocab_size=0)


def test_nothing_and_no_ids(tmp_path):
    found = inspect(build(tmp_path / "a", []))
    assert (found.lengths, found.ids.least, found.ids.most) == (None, None, None)
    assert inspect(build(tmp_path / "f", [[0.5]], np.float64)).ids is None
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(DamagedDataset):
        inspect(tmp_path / "a")


def test_the_record_is_that_of_the_build_that_is_there(tmp_path):
    prefix = build(tmp_path / "a", [[1]], tokenizer="gpt2")
    found = inspect(prefix)
    assert found.manifest.tokenizer == "gpt2" and found.source is None
    record = {"build": found.manifest.build, "command_line": ["x"]}
    (tmp_path / f"a{SOURCE}").write_text(json.dumps(record))
    assert inspect(prefix).source == record
    build(prefix, [[2]], overwrite=True)
    assert inspect(prefix).source is None
    (tmp_path / f"a{SOURCE}").write_text("{")
    assert inspect(prefix).source is None
