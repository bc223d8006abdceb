"""Attention by torch's product equals the twin, and makes no mask that it can do without."""

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megablocks_core.layers.attention import AttentionSpec, attention
from tests.layers.attention.requests import by, requests, results, sums, tensors


@given(requests(soft_cap=False))
def test_every_request_equals_the_twin(request):
    given, spec = request
    assert_close(
        results(by("sdpa"), given, spec), results(by("naive"), given, spec), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("left", [None, 100, 300])
def test_windows_longer_and_shorter_than_a_block_equal_the_twin(left):
    given = tensors(tokens=290, heads=2, kv_heads=1, width=2)
    for mask, right in (("causal", 0), ("full", 130)):
        spec = AttentionSpec(mask=mask, window=(left, right), sinks=torch.ones(2).double())
        assert_close(
            results(by("sdpa"), given, spec), results(by("naive"), given, spec), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        # The whole row has 1024 tokens: its products would be 2^20 numbers a head.
        ({"cu_seqlens": sums([64] * 16)}, 64 * 64),
        ({"cu_seqlens": sums([60] * 16), "cu_seqlens_padded": sums([64] * 16)}, 64 * 64),
        ({"cu_seqlens": sums([64] * 16), "sinks": torch.zeros(4).double()}, 65 * 65),
        ({"window": (16, None)}, 128 * (128 + 16)),
        ({"window": (16, None), "cu_seqlens": sums([512, 512])}, 128 * (128 + 16)),
        ({}, 0),
    ],
)
def test_nothing_as_large_as_a_rows_products_is_made(options, largest):
    q, k, v = tensors(tokens=1024, heads=4, kv_heads=4)
    given = 16 * 1025 * 4  # features of keys with sinks, of all heads
    with _Largest() as made:
        attention(q, k, v, AttentionSpec(**options), backend="sdpa").sum().backward()
    # Torch's product of float64 may be done in the open: of one document, in all heads.
    assert made.elements <= max(given, 4 * largest)


def test_the_measure_sees_products_of_a_whole_row():
    with _Largest() as made:
        attention(*tensors(tokens=1024), backend="naive")
    assert made.elements == 4 * 1024 * 1024


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_iter(made):
            if isinstance(x, torch.Tensor) and x._base is None:
                # An expanded tensor holds what its strides reach.
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return made


def test_sixteen_bits_with_sinks_are_close_to_the_exact_result():
    given = [x.detach().bfloat16() for x in tensors(tokens=40)]
    spec = AttentionSpec(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))
    y = by("sdpa")(*given, spec)
    exact = by("naive")(*(x.double() for x in given), spec)
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("window", [(None, None), (2, 0)])
def test_a_sink_of_minus_infinity_is_none(window):
    q, k, v = (torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(0)) for _ in "qkv")
    sinks = torch.full((2,), -float("inf"))
    found = results(by("sdpa"), (q, k, v), AttentionSpec(window=window, sinks=sinks))
    for other, backend in ((sinks, "naive"), (None, "sdpa")):
        spec = AttentionSpec(window=window, sinks=other)
        expected = results(by(backend), (q, k, v), spec)
        assert_close(found[: len(expected)], expected)
