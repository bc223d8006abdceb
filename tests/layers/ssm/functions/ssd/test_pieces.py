"""Pieces of a sequence cut by hand, joined by their maps, give what the whole gives."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd.pieces import Piece, scan_piece, state_map
from tests.layers.ssm.functions.ssd.cases import draw, sums_of

PACKINGS = [[24], [8, 8, 8], [7, 10, 7], [9, 0, 4, 11], [0, 3, 20], [2, 2, 2, 2]]


@pytest.mark.parametrize("lengths", [None, *PACKINGS], ids=str)
@pytest.mark.parametrize("bounds", [[8, 16], [1, 2], [5, 5]], ids=str)
@pytest.mark.parametrize("states", [False, True])
def test_maps_carry_states_from_piece_to_piece(lengths, bounds, states):
    sums = None if lengths is None else sums_of(lengths)
    count = 1 if lengths is None else len(lengths)
    x, dt, A, B, C, D, state = draw(1, 24, 4, 2, skip=1, states=count * states)
    right, final = ssd_recurrence(x, dt, A, B, C, D=D, initial_state=state, cu_seqlens=sums)
    piece = Piece(A, D, 4, state, True)
    carry, ys = torch.zeros(1, 4, 3, 4, dtype=torch.float64), []
    if state is not None and sums is None:
        carry = state
    for start, stop in zip([0, *bounds], [*bounds, 24], strict=True):
        tokens = [part[:, start:stop] for part in (x, dt, B, C)]
        inside = None if sums is None else (sums - start).clamp(0, stop - start)
        if sums is not None and (sums == start).any():
            first = int((sums <= start).sum()) - 1
            known = state is not None and first < count
            carry = state[first : first + 1] if known else torch.zeros_like(carry)
        y, last = scan_piece(piece, *tokens, cu_seqlens=inside, carry=carry)
        transition, added = state_map(piece, *tokens, cu_seqlens=inside)
        carry = transition * carry + added
        ys.append(y)
        if sums is not None:
            ends = (sums[1:] > start) & (sums[1:] <= stop) & (sums.diff() > 0)
            assert_close(last[ends], final[ends], rtol=0, atol=1e-9)
    assert_close(torch.cat(ys, dim=1), right, rtol=0, atol=1e-9)
    if sums is None:
        assert_close(last, final, rtol=0, atol=1e-9)
        assert_close(carry, final, rtol=0, atol=1e-9)


def test_a_piece_without_tokens_changes_no_state():
    x, dt, A, B, C, *_ = draw(2, 0, 4, 2)
    transition, added = state_map(Piece(A, None, 4, None, True), x, dt, B, C, cu_seqlens=None)
    assert (transition == 1).all() and transition.shape == (2, 4, 1, 1) and not added.any()
