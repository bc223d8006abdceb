"""16-bit weights are stepped in float32, and follow by rounding."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import Specs
from megablocks_core.parallel import StochasticRounding
from megablocks_core.parallel.sharded_optimizer.members import Member
from megablocks_core.parallel.sharded_optimizer.pieces import make_piece


def _piece(dtype, masters):
    parameter = nn.Parameter(torch.ones(2, 4, dtype=dtype))
    weight = parameter.detach().view(-1)[2:7]
    return parameter, make_piece(Member("w", parameter, Specs(), 0), 2, weight, masters=masters)


def _steps(piece, change, number):
    for step in range(number):
        piece.begin()
        piece.leaf.add_(change)
        piece.finish(step)
        piece.rest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masters", [True, False, StochasticRounding()])
def test_wide_weights_are_stepped_themselves(dtype, masters):
    parameter, piece = _piece(dtype, masters)
    assert (piece.start, piece.stop) == (2, 7)
    _steps(piece, 1.0, 2)
    assert parameter.tolist() == [[1, 1, 3, 3], [3, 3, 3, 1]]
    assert piece.leaf.data_ptr() == parameter.data_ptr() + 2 * dtype.itemsize


def test_a_master_adds_up_what_weights_are_too_coarse_for():
    parameter, piece = _piece(torch.bfloat16, True)
    _steps(piece, 2.0**-9, 4)
    assert piece.leaf.tolist() == [1 + 4 * 2.0**-9] * 5
    assert parameter.view(-1)[2:7].tolist() == [1 + 2.0**-7] * 5
    assert parameter.view(-1)[:2].tolist() == [1.0, 1.0]


def test_a_master_starts_from_weights_that_somebody_changed():
    parameter, piece = _piece(torch.bfloat16, True)
    _steps(piece, 2.0**-9, 1)
    with torch.no_grad():
        parameter.view(-1)[3] = 5.0
        parameter.view(-1)[4] = torch.nan
    piece.begin()
    kept = 1 + 2.0**-9
    assert piece.leaf[[0, 1, 3, 4]].tolist() == [kept, 5.0, kept, kept]
    assert piece.leaf[2].isnan()


def test_without_masters_small_steps_are_lost_or_taken_by_chance():
    parameter, piece = _piece(torch.bfloat16, False)
    _steps(piece, 2.0**-10, 8)
    assert (parameter == 1).all()
    assert piece.leaf.numel() == 0
    parameter, piece = _piece(torch.bfloat16, StochasticRounding(seed=1))
    _steps(piece, 2.0**-10, 400)
    mean = parameter.view(-1)[2:7].float().mean()
    assert abs(mean - (1 + 400 * 2.0**-10)) < 0.1
    assert piece.leaf.numel() == 0
