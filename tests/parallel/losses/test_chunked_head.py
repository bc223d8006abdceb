"""A head's logits never exist together, and nothing is computed that nobody wants."""

from unittest.mock import patch

import pytest
import torch

from megablocks_core import _native
from megablocks_core.parallel import (
    linear_cross_entropy,
)
from megablocks_core.parallel.losses import chunked_head, head_products, softmax_blocks
from tests.parallel.watching import Watch


def _inputs(vocab_size, length, *, features=6, dtype=torch.float64):
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((length, features), (vocab_size, features), (vocab_size,))
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(vocab_size, (length,), generator=generator)
    return [x.requires_grad_() for x in tensors], targets


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_of_all_logits_exists_at_any_length(reduction):
    largest = []
    for length in (64, 512):
        (hidden, weight, bias), targets = _inputs(100, length, features=2, dtype=torch.float32)
        small = patch.multiple(chunked_head, _CHUNK=16 * 100, _MOST_TOKENS=8)
        with small, Watch() as watch:
            options = {"soft_cap": 5.0, "label_smoothing": 0.1, "z_loss": 0.1}
            loss = linear_cross_entropy(
                hidden, weight, targets, bias=bias, reduction=reduction, **options
            )
            loss.sum().backward()
        largest.append(watch.largest)
    # Logits of 8 tokens and their slopes; with more tokens only what there is for each grows.
    assert largest[0] <= 8 * 100 * 4
    assert largest[1] <= 512 * 2 * 8


@pytest.mark.parametrize("native", [_native, None], ids=["extension", "torch"])
@pytest.mark.parametrize(("chunks", "features"), [(1, 2), (2, 2), (1, 20), (2, 20)])
def test_logits_of_16_bit_factors_are_computed_twice_and_not_kept(chunks, features, native):
    (hidden, weight, _), targets = _inputs(100, 8 * chunks, features=features, dtype=torch.bfloat16)
    narrow = patch.object(head_products, "_cpu_multiplies_bfloat16", return_value=True)
    small = patch.multiple(chunked_head, _MOST_TOKENS=8, _BLOCK=1, _FEWEST_COLUMNS=50)
    passes = patch.object(softmax_blocks, "_native", native)
    with narrow, small, passes, Watch() as watch:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert watch.products == 2 * chunks * 4
    block = 8 * 50 * (2 if native else 4)
    # The weight's gradient, or its wide sum, if there is one to add.
    assert watch.largest == max(block, 100 * features * (2 if chunks == 1 else 4))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_nobody_wants_are_not_computed(reduction):
    (hidden, weight, bias), targets = _inputs(6, 4)
    counts = {}
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        leaves = [
            x.detach().requires_grad_(r) for x, r in zip((hidden, weight), wanted, strict=True)
        ]
        with Watch() as watch:
            loss = linear_cross_entropy(*leaves, targets, bias=bias.detach(), reduction=reduction)
            if any(wanted):
                loss.sum().backward()
        counts[wanted] = watch.products
        assert [x.grad is not None for x in leaves] == list(wanted)
    once = 1 if reduction == "mean" else 2
    assert list(counts.values()) == [once + 2, once + 1, once + 1, 1]
    with torch.no_grad(), Watch() as watch:
        assert not linear_cross_entropy(hidden, weight, targets, reduction=reduction).requires_grad
    assert watch.products == 1
