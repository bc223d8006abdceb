"""Boundaries of documents on the device say what those on the host do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.attention import AttentionSpec
from megablocks_core.layers.attention.backends.boundaries import (
    Boundaries,
    pieces_of,
    without_gradient,
    zero_outside,
)
from tests.layers.attention.requests import sums


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_documents_and_pads_are_found_as_on_the_host(sizes, tail):
    lengths, rooms = [n for n, _ in sizes], [n + pads for n, pads in sizes]
    tokens = sum(rooms) + tail
    spec = AttentionSpec(cu_seqlens=sums(lengths), cu_seqlens_padded=sums(rooms))
    expected = []
    for number, piece in enumerate(pieces_of(sums(lengths), sums(rooms), tokens)):
        expected += [number // 2 if number % 2 == 0 else None] * piece
    bounds = Boundaries(spec, tokens)
    assert bounds.outside_T.tolist() == [document is None for document in expected]
    own = [
        (found, wanted)
        for found, wanted in zip(bounds.document_T.tolist(), expected, strict=True)
        if wanted is not None
    ]
    assert all(found == wanted for found, wanted in own)
    assert bounds.longest() == max(lengths)


def test_no_documents_leave_a_row_of_pads():
    bounds = Boundaries(AttentionSpec(cu_seqlens=torch.tensor([0])), 3)
    assert bounds.outside_T.all()
    assert bounds.longest() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": [0, 9]}, "must end within the row of 8"),
        ({"cu_seqlens": [1, 3]}, "start at 0"),
        ({"cu_seqlens": [0, 4, 2]}, "must not fall"),
        ({"cu_seqlens": [0, 4], "cu_seqlens_padded": [0, 3]}, "fit their places"),
        ({"cu_seqlens": [0, 4], "cu_seqlens_padded": [0, 4, 8]}, "must pair"),
        ({"cu_seqlens": [0, 4, 6], "max_seqlen": 3}, "max_seqlen=3 must be at least .* 4"),
    ],
)
def test_wrong_boundaries_raise_before_a_kernel_reads_by_them(monkeypatch, options, message):
    tensors = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    spec = AttentionSpec(**tensors)
    with pytest.raises(ValueError, match=message):
        Boundaries(spec, 8)
    if message != "must pair":
        # As elsewhere than on the CPU: the device itself checks, without a read on the host.
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(RuntimeError, match="sums of lengths of documents"):
            Boundaries(spec, 8)


def test_what_kernels_leave_outside_of_documents_is_zero():
    outside = torch.tensor([False, True, False])
    x = torch.ones(3, 2, 2, requires_grad=True)
    y = without_gradient(x, outside)
    (gradient,) = torch.autograd.grad(y, x, torch.full((3, 2, 2), torch.nan).nan_to_num(torch.inf))
    assert gradient[1].eq(0).all() and gradient[0].isinf().all()
    garbage = torch.full((3, 2, 2), torch.nan, requires_grad=True)
    z = zero_outside(garbage, outside)
    assert z[1].eq(0).all() and z[0].isnan().all()
    (gradient,) = torch.autograd.grad(z, garbage, torch.ones(3, 2, 2))
    assert gradient[:, 0, 0].tolist() == [1, 0, 1]
