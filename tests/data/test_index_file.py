"""The arrays of an index lie where the header says, and pointers never overflow."""

import io

import numpy as np
import pytest

from megablocks_core.data.index_file import DTYPES, HEADER, pointers, read_layout, write_index

LENGTHS, DOCUMENTS = np.array([3, 0, 1]), np.array([0, 2, 3])


def index_of(dtype, modes=None):
    file = io.BytesIO()
    write_index(file, dtype, LENGTHS, DOCUMENTS, modes)
    return file.getvalue()


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("modes", [None, np.array([0, -1, 5])], ids=["plain", "modes"])
def test_what_is_written_is_found_where_the_layout_says(code, modes):
    dtype = DTYPES[code]
    index = index_of(dtype, modes)
    layout = read_layout(index[: HEADER.size], len(index), "a.idx")
    assert (layout.dtype, layout.num_sequences, layout.num_indices) == (dtype, 3, 3)

    def part(bounds, letter):
        return np.frombuffer(index[slice(*bounds)], letter).tolist()

    assert part(layout.lengths, "<i4") == [3, 0, 1]
    assert part(layout.pointers, "<i8") == [0, 3 * dtype.itemsize, 3 * dtype.itemsize]
    assert part(layout.documents, "<i8") == [0, 2, 3]
    assert (layout.modes and part(layout.modes, "i1")) == (None if modes is None else [0, -1, 5])


def test_an_index_without_sequences_has_no_modes():
    file = io.BytesIO()
    write_index(file, DTYPES[4], LENGTHS[:0], DOCUMENTS[:1], LENGTHS[:0])
    assert read_layout(file.getvalue()[: HEADER.size], file.tell(), "a.idx").modes is None


@pytest.mark.parametrize("change", [-1, 1, 2, 4, 3000])
def test_any_other_size_is_refused(change):
    index = index_of(DTYPES[4])
    with pytest.raises(ValueError, match=rf"a\.idx: holds {len(index) + change} .*must hold 94"):
        read_layout(index[: HEADER.size], len(index) + change, "a.idx")


def test_f_112_pointers_are_64_bit():
    found = pointers(np.array([2**30] * 3, np.int32), 4)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 2**32, 2**33]
    assert pointers(np.array([], np.int32), 4).tolist() == []


def test_f_112_an_index_of_more_than_2_31_tokens_is_written_in_64_bit():
    file = io.BytesIO()
    write_index(file, DTYPES[4], np.array([2**31 - 1] * 3), np.array([0, 3]), None)
    layout = read_layout(file.getvalue()[: HEADER.size], file.tell(), "a.idx")
    found = np.frombuffer(file.getvalue()[slice(*layout.pointers)], "<i8")
    assert found.tolist() == [0, 2**33 - 4, 2**34 - 8]
