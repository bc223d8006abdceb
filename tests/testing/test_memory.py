"""Memory that nobody wrote is NaN, in the parent and on the ranks."""

import torch

from megablocks_core.testing import ranks


def _check():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3)).isnan().all()
    assert torch.ones(3).new_empty(2).isnan().all()
    assert torch.empty(2, dtype=torch.int64).eq(torch.iinfo(torch.int64).max).all()


def test_new_memory_is_nan():
    _check()


@ranks(2)
def test_new_memory_is_nan_on_the_ranks():
    _check()
