"""Segments and stacked experts are matrices of their own, found alike at every cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec, Specs
from megablocks_core.parallel.muon.matrices import matrix_layout, part_of, put_part


def _of(rank, size):
    """A group for arithmetic: it has no process group."""
    return Group(tuple(range(size)), rank=rank)


def _local(shape, specs):
    local = list(shape)
    for spec in specs:
        local[spec.dim] = spec.held_length(local[spec.dim])
    return torch.empty(local)


def test_a_packed_weight_has_a_matrix_for_each_segment():
    specs = Specs((ShardSpec(0, LOCAL, (Segment(8), Segment(4), Segment(0))),))
    layout = matrix_layout(torch.empty(12, 5), specs)
    assert layout is not None
    assert layout.boxes == [((0, 8), (0, 5)), ((8, 12), (0, 5))]
    assert layout.cuts == () and layout.split_dim is None
    assert layout.cost == 8 * 5 * 5 + 4 * 5 * 4


def test_experts_are_units_and_cuts_between_them_leave_units_whole():
    ep, etp = _of(1, 2), _of(0, 3)
    specs = Specs((ShardSpec(0, ep), ShardSpec(2, etp)), each="experts.{}.w", expert=True)
    parameter = torch.arange(48.0).view(2, 4, 6)
    layout = matrix_layout(parameter, specs)
    assert layout is not None
    assert layout.shape == (4, 18) and layout.stacked
    assert [(spec.dim, spec.group) for spec in layout.cuts] == [(1, etp)]
    assert layout.groups == (etp,) and layout.split_dim == 1
    first, second = layout.units(parameter)
    assert torch.equal(second, parameter[1])
    first.zero_()
    assert not parameter[0].any()


def test_a_cut_along_the_shorter_dimension_cannot_be_split():
    group = _of(0, 2)
    for shape, dim, split in (((4, 9), 0, None), ((4, 9), 1, 1), ((9, 4), 0, 0), ((4, 4), 0, 0)):
        specs = Specs((ShardSpec(dim, group, (Segment(shape[dim]),)),))
        layout = matrix_layout(_local(shape, specs), specs)
        assert layout is not None
        assert layout.split_dim == split
    both = Specs((ShardSpec(0, group), ShardSpec(1, _of(0, 3))))
    layout = matrix_layout(torch.empty(2, 2), both)
    assert layout is not None
    assert layout.split_dim is None


@pytest.mark.parametrize(
    ("shape", "each"), [((4,), None), ((2, 3, 4), None), ((4, 3), "e.{}"), ((2, 2, 2, 2), "e.{}")]
)
def test_what_has_not_two_dimensions_has_no_matrix(shape, each):
    assert matrix_layout(torch.empty(shape), Specs((), each=each)) is None


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_the_parts_of_all_ranks_are_the_matrix(sizes, outer, inner):
    segments = tuple(Segment(size) for size in sizes)
    whole = torch.arange(float(sum(sizes) * 3)).view(-1, 3)
    found = {box: [] for box in range(len(sizes))}
    for rank in range(outer):
        tp = ShardSpec(0, _of(rank, outer), segments)
        held = tp.held_length(len(whole))
        for place in range(inner):
            specs = Specs((tp, ShardSpec(0, _of(place, inner), (Segment(held),))))
            layout = matrix_layout(_local(whole.shape, specs), specs)
            assert layout is not None
            mine = torch.cat([whole[part] for part in layout.held[0]] or [whole[:0]])
            for box, (rows, columns) in enumerate(layout.boxes):
                at = layout.places(0, rows), layout.places(1, columns)
                found[box].append(part_of(mine, *at))
                again = mine.clone()
                put_part(again, *at, -part_of(mine, *at))
                assert torch.equal(part_of(again, *at), -part_of(mine, *at))
    start = 0
    for box, size in enumerate(sizes):
        rows = torch.cat(found[box])
        order = rows[:, 0].argsort()
        assert torch.equal(rows[order], whole[start : start + size])
        start += size
