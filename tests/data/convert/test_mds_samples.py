"""The bytes of shards: what is written is read, and what is damaged is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.convert.mds_samples import (
    ARRAY_DTYPES,
    Damaged,
    array_of,
    columns,
    sample_of,
    shard_of,
)


@given(st.lists(st.integers(0, 700), max_size=8), st.sampled_from(ARRAY_DTYPES))
def test_arrays_come_back(lengths, dtype):
    arrays = [np.arange(length).astype(dtype) for length in lengths]
    shard = memoryview(shard_of([sample_of(array) for array in arrays], b"{}"))
    found = list(columns(shard, len(arrays), [None], 0))
    for value, array in zip(found, arrays, strict=True):
        read = array_of(value, f"ndarray:{dtype}")
        assert read.dtype == array.dtype
        assert read.tolist() == array.tolist()


def test_a_column_lies_after_those_before_it():
    samples = [b"\2\0\0\0\3\0\0\0abFIXEDxyz", b"\0\0\0\0\1\0\0\0FIXEDq"]
    shard = memoryview(shard_of(samples, b"{}"))
    sizes = [None, 5, None]
    assert [list(map(bytes, columns(shard, 2, sizes, at))) for at in range(3)] == [
        [b"ab", b""],
        [b"FIXED", b"FIXED"],
        [b"xyz", b"q"],
    ]


@pytest.mark.parametrize("sample", [b"\2\0\0\0abc", b"\4\0\0\0abc", b"\2\0"])
def test_a_sample_is_its_columns_and_nothing_else(sample):
    with pytest.raises(Damaged, match="has a sample"):
        list(columns(memoryview(shard_of([sample], b"{}")), 1, [None], 0))


def test_arrays_of_every_encoding():
    three = np.array([1, 2, 3], "<i4")
    assert array_of(memoryview(three.tobytes()), "ndarray:int32:3").tolist() == [1, 2, 3]
    shaped = b"\4\3" + three.tobytes()
    assert array_of(memoryview(shaped), "ndarray:int32").tolist() == [1, 2, 3]
    found = array_of(memoryview(bytes([33]) + shaped), "ndarray")
    assert (found.tolist(), found.dtype) == ([1, 2, 3], np.dtype("i4"))
    with pytest.raises(Damaged, match=r"shape \[3, 1\], must be one row"):
        array_of(memoryview(b"\x08\3\1" + three.tobytes()), "ndarray:int32")
    for data in (b"", b"\4", b"\4\3abc", bytes([99]) + shaped):
        with pytest.raises(Damaged):
            array_of(memoryview(data), "ndarray")


@given(st.data())
def test_damaged_shards_are_told_or_read(data):
    samples = [sample_of(np.arange(length, dtype=np.uint16)) for length in (3, 0, 300)]
    whole = bytearray(shard_of(samples, b"{}"))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    shard = memoryview(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    try:
        for value in columns(shard, 3, [None], 0):
            array_of(value, "ndarray:uint16")
    except Damaged as error:
        assert str(error)
