"""Operations between tensors of files and ours have exact inverses, and read boxes exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.export.lazies import lazy, outline
from megablocks_core.export.operations import (
    Decay,
    Join,
    LogDecay,
    Offset,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
    apply,
    inverses,
)

sizes = st.integers(0, 4)


@st.composite
def chains(draw):
    """A shape and operations that can be applied to it one behind the other."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shapes, operations = [tuple(shape)], []
    for _ in range(draw(st.integers(0, 4))):
        if len(set(shapes)) > 1 or not shapes[0]:
            break
        shape = shapes[0]
        kinds = ["split", "resize", "unstack"] + ["transpose"] * (len(shape) > 1)
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "split":
            groups = draw(st.sampled_from([n for n in range(1, 5) if shape[dim] % n == 0]))
            span = shape[dim] // groups
            first = draw(st.integers(0, span))
            operation = Split((first, span - first), dim, groups)
        elif kind == "resize":
            operation = Resize(shape[dim], shape[dim] + draw(sizes), dim)
        elif kind == "unstack":
            operation = Unstack(shape[0])
        else:
            operation = Transpose(dim, draw(st.integers(0, len(shape) - 1)))
        made = apply([operation], [outline(shape) for shape in shapes])
        shapes, operations = [tuple(one.get_shape()) for one in made], [*operations, operation]
    return tuple(shape_of_whole(operations, shapes)), operations


def shape_of_whole(operations, shapes):
    (whole,) = apply(inverses(operations), [outline(shape) for shape in shapes])
    return whole.get_shape()


@given(chains(), st.sampled_from([0, 3, 2**15]), st.data())
def test_inverses_lead_back_and_boxes_are_boxes_of_the_whole(chain, near, data):
    """Whether pieces of a part lie far from each other, or near."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.export.operations._NEAR", near)
        _check(*chain, data)


def _check(shape, operations, data):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = apply(operations, [lazy(whole)])
    for part in parts:
        box = tuple(
            slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
            for n in part.get_shape()
        )
        values = part[...]
        assert tuple(values.shape) == tuple(part.get_shape())
        assert torch.equal(part[box], values[box])
        assert torch.equal(part[box[:1]], values[box[:1]]) if box else True
    held = [lazy(part[...]) for part in parts]
    (again,) = apply(inverses(operations), held)
    assert torch.equal(again[...], whole)
    box = tuple(slice(n // 3, n) for n in shape)
    assert torch.equal(again[box], whole[box])


def test_parts_of_groups_alternate():
    rows = torch.arange(12.0).view(6, 2)
    gate, up = Split((1, 1), groups=3)([lazy(rows)])
    assert torch.equal(gate[...], rows[0::2])
    assert torch.equal(up[...], rows[1::2])
    assert torch.equal(up[1:3], rows[1::2][1:3])
    q, k, v = Split((2, 1, 1), dim=1, groups=2)([lazy(rows.view(1, 12)[:, :8])])
    assert q[...].tolist() == [[0, 1, 4, 5]]
    assert k[...].tolist() == [[2, 6]]
    assert v[...].tolist() == [[3, 7]]


class Counted:
    """A tensor on meta that counts the values that are read of it, and the reads."""

    def __init__(self, *shape):
        self.whole, self.count, self.reads = torch.empty(shape, device="meta"), 0, 0

    def get_shape(self):
        return tuple(self.whole.shape)

    def get_dtype(self):
        return "F32"

    def __getitem__(self, box):
        self.count += self.whole[box].numel()
        self.reads += 1
        return self.whole[box]


def test_a_part_of_groups_is_read_without_what_lies_between():
    """The queries of all key heads, as Qwen3.5's files have them, of our packed projection."""
    packed = Counted(16 * 768, 2048)
    parts = Split((128, 128, 256, 256), groups=16)([packed])
    for part in parts:
        rows, hidden = part.get_shape()
        for first, last in ((0, rows), (rows // 4, rows // 2), (5, 9), (rows - 130, rows)):
            packed.count = 0
            assert part[first:last, 100:].shape == (last - first, hidden - 100)
            assert packed.count == (last - first) * (hidden - 100)


def test_pieces_that_lie_close_together_are_one_read():
    packed = Counted(2 * 600, 8)
    gate, up = Split((1, 1), groups=600)([packed])
    assert gate[100:200].shape == up[100:200].shape == (100, 8)
    assert (packed.reads, packed.count) == (2, 2 * 200 * 8)
    assert up[7:8].shape == (1, 8)
    assert (packed.reads, packed.count) == (3, 2 * 200 * 8 + 8)


def test_groups_are_made_of_the_rows_that_they_need():
    sizes = (128, 128, 256, 256)
    parts = [Counted(16 * size, 2048) for size in sizes]
    (packed,) = Join(sizes, groups=16)(parts)
    for first, last in ((0, 16 * 768), (4 * 768, 8 * 768), (5, 9), (100, 2000), (700, 12_000)):
        for part in parts:
            part.count = 0
        assert packed[first:last].shape == (last - first, 2048)
        assert sum(part.count for part in parts) == (last - first) * 2048


def test_a_stack_is_its_tensors():
    stack = torch.randn(3, 2, 4)
    apart = Unstack(3)([lazy(stack)])
    assert all(torch.equal(one[...], stack[index]) for index, one in enumerate(apart))
    (again,) = Stack(3)(apart)
    assert torch.equal(again[1:3, 0:1], stack[1:3, 0:1])
    assert again[2:2].shape == (0, 2, 4)


def test_f_166_f_167_rows_that_pad_are_zero_and_are_cut_off():
    table = torch.randn(10, 3)
    (padded,) = Resize(10, 12)([lazy(table)])
    assert padded.get_shape() == (12, 3)
    assert torch.equal(padded[9:12], torch.cat([table[9:], torch.zeros(2, 3)]))
    assert torch.equal(padded[11:12], torch.zeros(1, 3))
    (again,) = Resize(10, 12).inverse([padded])
    assert torch.equal(again[...], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functions_of_values_lead_back_to_rounding(dtype):
    values = (torch.rand(50, dtype=torch.float64) + 0.5).to(dtype)
    offset, decay = Offset(1.0), Decay()
    assert torch.equal(offset([lazy(values)])[0][...], (values.double() + 1).to(dtype))
    assert torch.equal(decay([lazy(values)])[0][...], (-values.double().exp()).to(dtype))
    for operation in (offset, decay):
        (again,) = apply([operation, operation.inverse], [lazy(values)])
        error = (again[...].double() - values.double()).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * (1 + values.double().exp())).all()
    assert LogDecay().inverse == decay


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (Split((2, 2)), [(5, 3)]),
        (Split((2, 2), dim=2), [(4, 4)]),
        (Split((1, 1), groups=3), [(4,)]),
        (Join((2, 3)), [(2, 4), (2, 4)]),
        (Join((2, 3)), [(2, 4), (3, 5)]),
        (Unstack(3), [(2, 3)]),
        (Stack(2), [(2, 3), (3, 2)]),
        (Transpose(0, 2), [(2, 3)]),
        (Resize(10, 12), [(12, 4)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(operation, shapes):
    with pytest.raises(ValueError, match=type(operation).__name__):
        apply([operation], [outline(shape) for shape in shapes])


def test_operations_take_as_many_as_they_say():
    with pytest.raises(ValueError, match="takes 2 tensors at a time, not 3"):
        apply([Join((1, 1))], [outline((1,))] * 3)
