"""Slabs cover a tensor once, in its order, and no slab is larger than asked for."""

from math import prod

import pytest
import torch

from megablocks_core.export import slabs as module
from megablocks_core.export.lazies import View, lazy
from megablocks_core.export.slabs import dtype_of, nbytes_of, slabs


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (2, 3, 4), (3, 2, 20), (3, 0), (0, 3)])
def test_slabs_cover_each_element_once_in_order(monkeypatch, shape):
    monkeypatch.setattr(module, "SLAB_BYTES", 32)
    whole = torch.arange(float(prod(shape))).view(shape)
    found = [whole[box] for box in slabs(shape, torch.float32)]
    assert all(one.numel() * 4 <= 32 and one.dim() == whole.dim() for one in found)
    assert torch.equal(torch.cat([one.reshape(-1) for one in found]), whole.reshape(-1))
    assert len(found) == 1 or all(one.numel() for one in found)


def test_sizes_and_dtypes():
    tensor = lazy(torch.ones(2, 3), "BF16")
    assert (dtype_of(tensor), nbytes_of(tensor)) == (torch.bfloat16, 12)
    with pytest.raises(ValueError, match="dtype F4 must be one of"):
        dtype_of(View((2,), "F4", lambda box: torch.ones(2)))
