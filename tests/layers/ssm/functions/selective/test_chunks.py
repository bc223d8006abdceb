"""Chunks of the selective scan go on from each other; places without tokens change nothing."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.chunked.borders import Borders
from megablocks_core.layers.ssm.functions.chunked.scan import recurrence_of
from megablocks_core.layers.ssm.functions.selective.chunks import NAME
from tests.layers.ssm.functions.chunked.kinds import KINDS, states

_KIND = KINDS["selective"]


def test_chunks_go_on_and_places_without_tokens_change_nothing():
    torch.manual_seed(0)
    x, dt, A, B, C, _ = (leaf.detach() for leaf in _KIND.leaves(1, 8))
    state = states(_KIND, 1).detach()
    inputs = [part.unflatten(1, (2, 4)) for part in (x, dt, B, C)]
    y, behind = recurrence_of(NAME).forward(inputs, [A], state, Borders(), True)
    assert y is not None
    for token in range(8):
        state = torch.exp(dt[:, token, :, None] * A) * state
        state = state + (dt * x)[:, token, :, None] * B[:, token, None]
        assert_close(y.flatten(1, 2)[:, token], (state * C[:, token, None]).sum(-1))
    assert_close(behind[1], state)
    _, same = recurrence_of(NAME).forward([x * 0 for x in inputs], [A], state, Borders(), False)
    assert torch.equal(same[1], state)
