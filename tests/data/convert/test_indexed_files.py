"""An indexed dataset gives its documents, and is written of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import IndexedDatasetBuilder
from megablocks_core.data.convert import convert, indexed_files
from megablocks_core.data.convert.documents import Counts
from megablocks_core.data.convert.indexed_files import IndexedSource

from .conftest import contents, documents, write


@given(rows=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=9))
def test_documents_of_any_sequences_are_joined_and_counted(tmp_path_factory, rows):
    prefix = tmp_path_factory.mktemp("x") / "x"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for row in rows:
            for sequence in row:
                builder.add_item(sequence)
            builder.end_document()
    counts = Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_files, "_DOCUMENTS", 2)
        batches = list(IndexedSource(str(prefix)).batches(counts))
    found = [document.tolist() for batch in batches for document in batch.documents()]
    assert found == [sum(row, []) for row in rows]
    assert counts.joined == sum(len(row) > 1 for row in rows)


def test_a_dataset_of_another_dtype_keeps_ids_and_tokenizer(tmp_path):
    rows = [[1, 2], [], [70]]
    write(tmp_path / "x", rows, tokenizer="bytes")
    report = convert(tmp_path / "x", tmp_path / "y", target_dtype="int32")
    assert documents(tmp_path / "y") == rows
    assert (report.dtype, report.documents, report.tokens) == ("int32", 3, 3)
    convert(tmp_path / "y", tmp_path / "z", target_dtype="uint16")
    assert contents(tmp_path / "z") == contents(tmp_path / "x")
    assert IndexedSource(str(tmp_path / "z")).tokenizer == "bytes"


def test_damage_and_modes_are_refused(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2, 3]])
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.bin: holds 6 bytes of xxh3-128"):
        convert(prefix, f"mds:{tmp_path / 'y'}")
    with IndexedDatasetBuilder(tmp_path / "m", np.uint16, multimodal=True) as builder:
        builder.add_document([1])
    with pytest.raises(ValueError, match="has modes"):
        convert(tmp_path / "m", f"mds:{tmp_path / 'y'}")
    assert not (tmp_path / "y").exists()
