"""A dispatcher that only dispatches and combines is served in steps too."""

import pytest
import torch

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from tests.layers.moe.dispatch.reference import choices, random, routing_of


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_steps_are_the_whole(chunks):
    x, indices = random(5, 4), choices("plain", 5, 3, 2)
    routing, dispatcher = routing_of(indices, torch.rand(indices.shape), 3), LocalDispatcher()
    whole, handle = dispatcher.dispatch(x, routing)
    (piece,) = dispatcher.start_dispatch(x, routing, chunks=chunks)
    dispatched, own_handle = piece.wait()
    assert torch.equal(dispatched.rows, whole.rows)
    y = random(len(whole.rows), 4, seed=1)
    started = [dispatcher.start_combine(y, own_handle)]
    assert torch.equal(dispatcher.finish_combine(started), dispatcher.combine(y, handle))
