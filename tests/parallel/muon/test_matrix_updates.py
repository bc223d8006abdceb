"""The three ways to serve cut matrices give what whole ones give."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh, Segment, ShardSpec, Specs, load_slices
from megablocks_core.parallel.muon import matrix_updates
from megablocks_core.parallel.muon.matrices import matrix_layout
from megablocks_core.parallel.muon.matrix_updates import MODES, Unit, orthogonal_updates, scaled
from megablocks_core.parallel.muon.newton_schulz import NewtonSchulz
from megablocks_core.testing import ranks

# Shapes and cuts: a list of (axis, dimension, segments).
_CASES = [
    ((8, 6), [("tp", 0, None)]),
    ((6, 8), [("tp", 1, None), ("dp", 1, None)]),
    ((9, 4), [("tp", 0, (Segment(6), Segment(3, parts=1))), ("dp", 0, "rest")]),
    ((4, 12), [("tp", 0, None), ("dp", 1, None)]),
    ((5, 5), []),
    ((1, 7), [("dp", 0, (Segment(1),))]),  # one rank has it all
]


def _units(groups, wholes):
    units = []
    for (shape, cuts), whole in zip(_CASES, wholes, strict=True):
        specs, local = [], list(shape)
        for axis, dim, segments in cuts:
            if segments == "rest":
                segments = (Segment(local[dim]),)
            specs.append(ShardSpec(dim, groups[axis], segments))
            local[dim] = specs[-1].held_length(local[dim])
        share = torch.empty(local, dtype=whole.dtype)
        load_slices(share, tuple(specs), whole)
        layout = matrix_layout(share, Specs(tuple(specs)))
        assert layout is not None
        units.append((Unit(share, layout), tuple(specs)))
    return units


def _wholes():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape, _ in _CASES]


@ranks(4)
@pytest.mark.parametrize("batch", [1, 1 << 26])
@pytest.mark.parametrize("mode", MODES)
def test_shares_of_the_result_are_those_of_whole_matrices(mode, batch):
    mesh = Mesh(tp=2, dp=2)
    wholes, method = _wholes(), NewtonSchulz()
    alone = [unit for unit, _ in _units({"tp": LOCAL, "dp": LOCAL}, wholes)]
    expected = orthogonal_updates(alone, method, mode=mode)
    cut = _units({"tp": mesh.group("tp"), "dp": mesh.group("dp")}, wholes)
    matrix_updates._BATCH, before = batch, matrix_updates._BATCH
    try:
        found = orthogonal_updates([unit for unit, _ in cut], method, mode=mode)
    finally:
        matrix_updates._BATCH = before
    for x, whole, (_, specs) in zip(found, expected, cut, strict=True):
        share = torch.empty_like(x)
        load_slices(share, specs, whole)
        assert_close(x, share, rtol=0, atol=1e-12)


def test_each_matrix_has_its_own_scale():
    specs = Specs((ShardSpec(0, LOCAL, (Segment(4), Segment(2))),))
    layout = matrix_layout(torch.empty(6, 3), specs)
    assert layout is not None
    found = scaled(torch.ones(6, 3), layout, lambda rows, columns: 10 * rows + columns)
    assert torch.equal(found, torch.tensor([43.0] * 4 + [23.0] * 2)[:, None].expand(6, 3))


def test_nothing_is_nothing():
    assert orthogonal_updates([], NewtonSchulz(), mode="gather") == []
