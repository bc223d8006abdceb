"""Sums of exponentials and gradients agree with float64, in one pass and by torch."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from megablocks_core import _native
from megablocks_core.parallel import linear_cross_entropy
from megablocks_core.parallel.losses import head_products, softmax_blocks
from megablocks_core.parallel.losses.softmax_blocks import (
    Terms,
    make_gradients_,
    prepare_,
    softmax_sums_,
    takes_bfloat16,
)

WITHOUT = patch.object(softmax_blocks, "_native", None)
WITH = patch.object(softmax_blocks, "_native", _native)
LOWEST = torch.finfo(torch.float32).min
ODD = st.sampled_from([-torch.inf, torch.nan, -1e30, 1e30, -90.0, 88.0, 0.0, -1e-30, 1e-40, LOWEST])


@st.composite
def _blocks(draw):
    """Logits [n b] with some odd ones, and targets inside the block and outside of it."""
    num_tokens, width = draw(st.integers(0, 70)), draw(st.integers(0, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    x_nb = torch.randn(width, num_tokens, generator=generator).t() * draw(st.sampled_from([1, 30]))
    if x_nb.numel():
        for place in draw(st.lists(st.integers(0, x_nb.numel() - 1), max_size=5)):
            x_nb[place // width, place % width] = draw(ODD)
        if draw(st.booleans()):
            x_nb[draw(st.integers(0, num_tokens - 1))] = -torch.inf
    targets_n = torch.randint(-3, width + 3, (num_tokens,), generator=generator)
    return x_nb.bfloat16() if draw(st.booleans()) else x_nb, targets_n


def _at_targets(x_nb, targets_n):
    """Each token's logit at its target, or zero."""
    rows = zip(x_nb.tolist(), targets_n.tolist(), strict=True)
    logits = [row[target] if 0 <= target < len(row) else 0.0 for row, target in rows]
    return torch.tensor(logits, dtype=torch.float64)


def _sums(x_nb, targets_n):
    """The four numbers, in float64."""
    x_nb = x_nb.double()
    top_n = torch.full((len(x_nb),), LOWEST, dtype=torch.float64)
    if x_nb.shape[-1]:
        top_n = x_nb.amax(-1).clamp(min=LOWEST)
    exp_n = (x_nb - top_n.unsqueeze(-1)).exp().sum(-1)
    return torch.stack([top_n, exp_n, _at_targets(x_nb, targets_n), x_nb.sum(-1)])


def _terms(num_tokens):
    numbers = torch.Generator().manual_seed(1)
    return [torch.rand(num_tokens, generator=numbers) for _ in range(3)]


@given(_blocks(), st.sampled_from(["one pass", "torch"]))
def test_sums_are_those_of_float64(case, way):
    x_nb, targets_n = case
    expected_kn = _sums(x_nb, targets_n)
    if way == "torch":
        x_nb = x_nb.float()
    with WITH if way == "one pass" else WITHOUT:
        out_kn = softmax_sums_(x_nb.t().clone().t(), targets_n, all_logits=True)
        three_kn = softmax_sums_(x_nb.t().clone().t(), targets_n, all_logits=False)
    assert torch.equal(three_kn.nan_to_num(7.0), out_kn[:3].nan_to_num(7.0))
    number_n = ~expected_kn[1].isnan()
    # Beside one that is no number, the largest logit may be either; the sum says so.
    assert out_kn[1].isnan().tolist() == (~number_n).tolist()
    assert_close(out_kn[:2, number_n].double(), expected_kn[:2, number_n], rtol=2e-6, atol=1e-30)
    assert_close(out_kn[2].double(), expected_kn[2], rtol=0, atol=0, equal_nan=True)
    size_n = x_nb.double().abs().sum(-1)
    finite_n = expected_kn[3].isfinite() & (size_n < 1e38)
    assert ((out_kn[3] - expected_kn[3]).abs() <= 2e-6 * size_n + 1e-30)[finite_n].all()


@given(_blocks(), st.sampled_from(["one pass", "torch"]), st.booleans(), st.booleans())
def test_gradients_are_those_of_float64(case, way, smoothed, more_elsewhere):
    x_nb, targets_n = case
    if way == "torch":
        x_nb = x_nb.float()
    factor_n, shift_n, hit_n = _terms(len(x_nb))
    with WITH if way == "one pass" else WITHOUT:
        given_nb = x_nb.t().clone().t()
        part_n = softmax_sums_(given_nb, targets_n, all_logits=False)[0]
        top_n = part_n + 1.0 if more_elsewhere else part_n
        terms = Terms(top_n, factor_n, shift_n if smoothed else None, hit_n)
        make_gradients_(given_nb, targets_n, part_n, terms)
    top_n1 = top_n.double().unsqueeze(-1)
    expected_nb = (x_nb.double() - top_n1).exp() * factor_n.double().unsqueeze(-1)
    if smoothed:
        expected_nb -= shift_n.double().unsqueeze(-1)
    for row, target, hit in zip(expected_nb, targets_n.tolist(), hit_n, strict=True):
        if 0 <= target < len(row):
            row[target] += hit.double()
    narrow = x_nb.dtype == torch.bfloat16
    whole_n = ~_sums(x_nb, targets_n)[1].isnan()
    assert_close(
        given_nb[whole_n].double(),
        expected_nb[whole_n],
        rtol=2.0**-8 if narrow else 1e-6,
        atol=4e-7,
    )
    assert given_nb[~whole_n].isnan().any(-1).all()


def test_exponentials_are_right_to_a_unit_of_the_last_place():
    x_n = torch.cat([-torch.logspace(-30, 1.939, 200_001), torch.tensor([0.0, -0.0, -87.0])])
    x_nb, one_n, zero_n = x_n.clone().unsqueeze(-1), torch.ones_like(x_n), torch.zeros_like(x_n)
    make_gradients_(x_nb, torch.full(x_n.shape, -1), zero_n, Terms(zero_n, one_n, None, zero_n))
    exact_n = x_n.double().exp()
    units_n = (x_nb.squeeze(-1) - exact_n).abs() / (torch.frexp(exact_n)[1] - 24.0).exp2()
    assert units_n.max() < 1.0


@pytest.mark.parametrize("x", [-88.0, -1e4, -3e38, -torch.inf])
def test_what_were_denormal_is_zero(x):
    x_nb, zero_n = torch.full((40, 3), x).t().contiguous().t(), torch.zeros(40)
    terms = Terms(zero_n, zero_n + 1, None, zero_n)
    make_gradients_(x_nb, torch.full((40,), -1), zero_n, terms)
    assert not x_nb.any()


def test_gradients_of_bfloat16_are_rounded_to_nearest_even():
    bits_n = torch.randint(
        -(2**31), 2**31 - 1, (50_000,), generator=torch.Generator().manual_seed(0)
    )
    ties_n = (bits_n >> 16 << 16) + 0x8000
    edges_n = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, -1, -(2**31)])
    factor_n = torch.cat([bits_n, ties_n, edges_n]).int().view(torch.float32)
    x_n1, zero_n = torch.zeros(len(factor_n), 1, dtype=torch.bfloat16), torch.zeros(len(factor_n))
    make_gradients_(
        x_n1, torch.full(factor_n.shape, -1), zero_n, Terms(zero_n, factor_n, None, zero_n)
    )
    assert_close(x_n1.squeeze(-1), factor_n.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_same_bits_on_any_number_of_threads(dtype):
    x_bn = torch.randn(700, 2_500, dtype=dtype) * 3
    targets_n = torch.randint(-20, 720, (2_500,))
    results = []
    for threads in (1, 2, 3):
        with patch("torch.get_num_threads", return_value=threads):
            x_nb = x_bn.clone().t()
            sums_kn = softmax_sums_(x_nb, targets_n, all_logits=True)
            terms = Terms(sums_kn[0], 1 / sums_kn[1], torch.ones(2_500), -torch.ones(2_500))
            make_gradients_(x_nb, targets_n, sums_kn[0], terms)
        results.append((sums_kn, x_nb))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    assert_close(results[0][0].double(), _sums(x_bn.t(), targets_n), rtol=3e-6, atol=1e-3)


def test_logits_of_a_token_side_by_side_are_left_to_torch():
    x_nb, targets_n = torch.randn(5, 9), torch.tensor([0, 3, -1, 9, 8])
    expected_kn = _sums(x_nb, targets_n)[:3]
    assert_close(softmax_sums_(x_nb, targets_n, all_logits=False).double(), expected_kn)
    assert x_nb.max() == 1.0, "torch leaves exponentials"
    prepare_(x_nb, torch.ones(5))
    assert x_nb.max() == 1.0


def test_the_extension_leaves_logits_until_they_become_gradients():
    x_nb = torch.randn(9, 5).t()
    before_nb = x_nb.clone()
    softmax_sums_(x_nb, torch.zeros(5, dtype=torch.long), all_logits=True)
    prepare_(x_nb, torch.ones(5))
    assert torch.equal(x_nb, before_nb)
    assert takes_bfloat16()
    with WITHOUT:
        assert not takes_bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"soft_cap": 3.0}]
)
def test_losses_agree_with_and_without_the_extension(dtype, bias, options):
    torch.manual_seed(0)
    leaves = [torch.randn(*s, dtype=dtype).requires_grad_() for s in ((40, 8), (300, 8), (300,))]
    targets = torch.randint(300, (40,))
    targets[::3] = -100
    options = options | ({"bias": leaves[2]} if bias else {})
    results = []
    narrow = patch.object(head_products, "_cpu_multiplies_bfloat16", return_value=True)
    for extension in (WITH, WITHOUT):
        with extension, narrow:
            loss = linear_cross_entropy(*leaves[:2], targets, **options)
            results.append([loss, *torch.autograd.grad(loss, leaves[: 2 + bias])])
    for one, other in zip(*results, strict=True):
        size = other.double().norm()
        assert (one - other).double().norm() < (1e-6 if one.dtype == torch.float32 else 3e-3) * size


def test_arrays_that_do_not_fit_are_refused():
    logits, targets = np.zeros((4, 3), np.float32), np.zeros(3, np.int64)
    for rows, tokens in ((2, 3), (5, 3), (3, 2)):
        with pytest.raises(ValueError, match="out must have 3 or 4 rows"):
            _native.softmax_sums(logits, targets, out=np.zeros((rows, tokens), np.float32))
    for rows, tokens in ((3, 3), (4, 2)):
        with pytest.raises(ValueError, match="terms must be 4 rows"):
            _native.softmax_gradients(logits, targets, terms=np.zeros((rows, tokens), np.float32))
    short, four = targets[:2], np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match="number of tokens"):
        _native.softmax_sums(logits, short, out=four)
    with pytest.raises(ValueError, match="number of tokens"):
        _native.softmax_gradients(logits, short, terms=four)
    with pytest.raises(ValueError, match="threads=0"):
        _native.softmax_sums(logits, targets, out=four, threads=0)
    with pytest.raises(ValueError, match="threads=0"):
        _native.softmax_gradients(logits, targets, terms=four, threads=0)
