"""A parameter's gradient is reduced by one wrapper at a time."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from megablocks_core.groups import marks
from megablocks_core.parallel.wrapping.claims import (
    claim,
    is_claimed,
    refuse_claimed,
    release,
)


class _Owner:
    pass


def test_a_claim_lasts_as_long_as_its_owner():
    parameter, owner = nn.Parameter(torch.ones(1)), _Owner()
    assert not is_claimed(parameter)
    claim(parameter, owner)
    assert is_claimed(parameter)
    release(parameter)
    assert not is_claimed(parameter)
    release(parameter)
    claim(parameter, owner)
    del owner
    gc.collect()
    assert not is_claimed(parameter)


def test_copies_are_free():
    parameter, owner = nn.Parameter(torch.ones(1)), _Owner()
    claim(parameter, owner)
    assert not is_claimed(copy.deepcopy(parameter))
    assert not is_claimed(pickle.loads(pickle.dumps(parameter)))
    assert is_claimed(parameter)


def test_the_first_that_is_claimed_is_named():
    model, owner = nn.Linear(2, 2), _Owner()
    refuse_claimed(marks(model))
    claim(model.bias, owner)
    with pytest.raises(ValueError, match="'bias' has its gradient reduced by another wrapper"):
        refuse_claimed(marks(model))
