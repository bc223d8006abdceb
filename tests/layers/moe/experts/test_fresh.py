"""Fresh tensors are plain ones, whether or not the system gives large pages."""

import pytest
import torch

from megablocks_core.layers.moe.experts.fresh import fresh


@pytest.mark.parametrize("rows", (0, 3, 3 << 10))
def test_a_fresh_tensor_can_be_filled(rows):
    like = torch.empty(1, dtype=torch.bfloat16)
    made = fresh(like, rows, 1 << 10)
    assert made.shape == (rows, 1 << 10) and made.dtype == like.dtype and made.is_contiguous()
    assert made.fill_(3).eq(3).all()


def test_large_memory_is_asked_for_in_large_pages():
    made = fresh(torch.empty(0), 16 << 20).fill_(1)
    start = made.data_ptr()
    with open("/proc/self/smaps") as smaps:
        flags = _flags_at(smaps, start + made.nbytes // 2)
    assert "hg" in flags


def _flags_at(smaps, address):
    """The flags of the mapping that holds an address."""
    inside = False
    for line in smaps:
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    return []
