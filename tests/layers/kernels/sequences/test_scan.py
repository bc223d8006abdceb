"""The scan in Triton is the recurrence, with all gradients, as ``ssd_chunk_scan`` uses it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megablocks_core.layers.kernels.sequences import scan as launches
from megablocks_core.layers.ssm.functions.ssd import ssd_chunk_scan
from tests.layers.kernels.interpreter import interpreted
from tests.layers.kernels.sequences.serving import (
    LIMITS,
    assert_near,
    in_triton,
    narrowed,
    widened,
)
from tests.layers.ssm.functions.ssd.cases import draw, recurrence, run, sums_of

# x, B and C; the rest stays float32 as models have it.
NARROW = (0, 3, 4)

# What is drawn, the lengths of documents, and the chunk's size.
CASES = {
    "rows, groups, a short last chunk": (
        {"rows": 2, "length": 23, "heads": 4, "groups": 2, "skip": 1, "states": 2},
        None,
        16,
    ),
    "a chunk of several tiles, strong decays": (
        {"rows": 1, "length": 75, "heads": 2, "groups": 1, "skip": 2, "strength": 20.0},
        None,
        70,
    ),
    "documents with states": (
        {"rows": 1, "length": 30, "heads": 2, "groups": 2, "states": 5},
        [3, 5, 0, 14, 6],
        8,
    ),
    "documents without states, and what is behind the last": (
        {"rows": 1, "length": 30, "heads": 2, "groups": 1, "skip": 1},
        [8, 1, 14],
        8,
    ),
}
LARGE = {"rows": 1, "length": 70, "heads": 2, "groups": 1, "features": 70, "state": 66}


def scanned(leaves, **options):
    """By the kernels, forward and backward."""
    with in_triton() as taken:
        results = run(ssd_chunk_scan, leaves, **options)
    assert len(taken) == 2
    return results


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_outputs_states_and_gradients(case):
    sizes, lengths, chunk_size = CASES[case]
    leaves = narrowed(draw(**sizes), torch.float32)
    documents = {} if lengths is None else {"cu_seqlens": sums_of(lengths)}
    results = scanned(leaves, chunk_size=chunk_size, **documents)
    assert_near(results, recurrence(widened(leaves), **documents), 2e-6)


@pytest.mark.parametrize("finals", [True, pytest.param(False, marks=pytest.mark.slow)])
@interpreted
def test_half_precision(finals):
    """Sixteen bits in, sixteen bits out, float32 between."""
    leaves = narrowed(draw(1, 20, 2, 1, skip=1), torch.bfloat16, of=NARROW)
    documents = {"cu_seqlens": sums_of([7, 13])}
    results = scanned(leaves, chunk_size=16, return_final_state=finals, **documents)
    right = recurrence(widened(leaves), finals=finals, **documents)
    assert results[0].dtype == torch.bfloat16
    assert_near(results, right, LIMITS[torch.bfloat16])


@interpreted
def test_decays_that_overflow_leave_finite_gradients():
    leaves = narrowed(draw(1, 20, 1, 1, strength=1e6), torch.float32)
    results = scanned(leaves, chunk_size=16)
    assert all(each.isfinite().all() for each in results)


@pytest.mark.slow
@interpreted
def test_two_runs_give_the_same_bits():
    leaves = narrowed(draw(1, 20, 2, 1, skip=1), torch.float32)
    one, other = (scanned(leaves, chunk_size=8) for _ in range(2))
    assert all(map(torch.equal, one, other))


@interpreted
def test_views_that_are_not_contiguous():
    x, dt, A, B, C, _, _ = narrowed(draw(1, 20, 2, 2), torch.float32)
    apart = [part.detach().transpose(1, 2).contiguous().transpose(1, 2) for part in (x, B, C)]
    x_, B_, C_ = (part.requires_grad_() for part in apart)
    results = scanned([x_, dt, A, B_, C_, None, None], chunk_size=8)
    right = recurrence(widened([x, dt, A, B, C, None, None]))
    assert_near(results, right, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [5, 70, 200])
@pytest.mark.parametrize("dtype", LIMITS)
@interpreted
def test_sizes_beyond_a_tile(dtype, chunk_size):
    leaves = narrowed(draw(**LARGE, skip=2, states=1), dtype, of=NARROW)
    results = scanned(leaves, chunk_size=chunk_size)
    assert_near(results, recurrence(widened(leaves)), LIMITS[dtype])


def test_nothing_is_read_on_the_host(monkeypatch):
    seen = []
    monkeypatch.setattr(launches, "launch", lambda kernel, *rest, **named: seen.append(kernel))
    with FakeTensorMode():
        leaves = narrowed(draw(1, 20, 2, 1, skip=1, states=2), torch.float32)
        document, entries = torch.zeros(20, dtype=torch.int64), torch.zeros(3, 1, 2, 3, 4)
        given = (*leaves[:6], entries, document)
        y, states = launches.scan(*given, carry=None, chunk_size=8)
        gradients = launches.scan_gradients(
            *given, carry=states[0], dy=y, dfinal=states[-1], dstates=states[:-1], chunk_size=8
        )
    assert len(seen) == 4 + 10
    shapes = [tuple(each.shape) for each in (*given[:7], states[0])]
    assert [tuple(each.shape) for each in gradients if each is not None] == shapes
