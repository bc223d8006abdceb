"""Slabs cover a tensor once, and no slab is larger than asked for if rows are no longer."""

import pytest
import torch

from megablocks_core.export import slabs as module
from megablocks_core.export.operations import View, lazy
from megablocks_core.export.slabs import dtype_of, nbytes_of, slabs


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (2, 3, 4), (3, 0)])
def test_slabs_cover_each_element_once(monkeypatch, shape):
    monkeypatch.setattr(module, "SLAB_BYTES", 32)
    seen = torch.zeros(shape)
    for box in slabs(shape, torch.float32):
        assert seen[box].numel() * 4 <= 32 or seen[box].shape[:1] == (1,)
        seen[box] += 1
    assert (seen == 1).all()


def test_sizes_and_dtypes():
    tensor = lazy(torch.ones(2, 3), "BF16")
    assert (dtype_of(tensor), nbytes_of(tensor)) == (torch.bfloat16, 12)
    with pytest.raises(ValueError, match="dtype F4 must be one of"):
        dtype_of(View((2,), "F4", lambda box: torch.ones(2)))
