"""Passes over the same things: each has all of them, in the order of its own permutation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.epoch_order import EpochOrder
from megablocks_core.data.permutation import Permutation


@given(size=st.integers(1, 50), seed=st.integers(0, 9), places=st.lists(st.integers(0, 500)))
def test_a_place_is_that_of_its_epochs_permutation(size, seed, places):
    order = EpochOrder(size, seed=seed)
    plain = [Permutation(size, seed=seed, epoch=k // size)(k % size) for k in places]
    assert order(np.array(places, np.int64)).tolist() == plain


def test_an_epoch_has_each_once_in_an_order_of_its_own():
    order = EpochOrder(40, seed=3)
    epochs = order(np.arange(120)).reshape(3, 40)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(40))] * 3
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
