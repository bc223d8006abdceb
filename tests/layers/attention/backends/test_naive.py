"""The plain twin computes what the formula says, written with one loop over queries."""

import torch
from hypothesis import given
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec
from tests.layers.attention.requests import by, requests, results


@given(requests())
def test_every_request_equals_the_formula_query_by_query(request):
    given, spec = request
    assert_close(
        results(by("naive"), given, spec), results(_by_query, given, spec), rtol=0, atol=1e-10
    )


def _by_query(q, k, v, spec):
    """Each query over the list of keys that it sees."""
    rows = [
        torch.stack([_one(q[b], k[b], v[b], spec, t) for t in range(q.shape[1])])
        for b in range(q.shape[0])
    ]
    unseen = 0 * (q.sum() + k.sum() + v.sum())
    return torch.stack(rows) + unseen


def _one(q, k, v, spec, t):
    share = q.shape[1] // k.shape[1]
    outputs = []
    for head in range(q.shape[1]):
        seen = [s for s in range(len(k)) if _sees(len(q), len(k), t, s, spec)]
        keys, values = k[seen, head // share], v[seen, head // share]
        scores = keys @ q[t, head] * (q.shape[2] ** -0.5 if spec.scale is None else spec.scale)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.exp()
        total = weights.sum() + (0 if spec.sinks is None else spec.sinks[head].exp())
        outputs.append((weights / total) @ values if seen else values.new_zeros(v.shape[2]))
    return torch.stack(outputs)


def _sees(tokens, keys, t, s, spec):
    place = t + keys - tokens
    before, behind = spec.window
    if spec.mask == "causal" and s > place:
        return False
    if (before is not None and s < place - before) or (behind is not None and s > place + behind):
        return False
    if spec.cu_seqlens is None:
        return True
    lengths = spec.cu_seqlens.diff().tolist()
    places = spec.cu_seqlens if spec.cu_seqlens_padded is None else spec.cu_seqlens_padded
    own = [start <= t < start + n and start <= s < start + n
           for start, n in zip(places.tolist(), lengths, strict=False)]  # fmt: skip
    return any(own)


def test_f_099_a_sink_of_zero_beside_two_products_of_zero_leaves_two_thirds():
    q, k = torch.zeros(1, 1, 1, 4, dtype=torch.float64), torch.zeros(1, 2, 1, 4).double()
    v = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    for backend in ("naive", "sdpa"):
        sinks = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        y = by(backend)(q, k, v, AttentionSpec(mask="full", sinks=sinks))
        assert_close(y.flatten(), torch.full((2,), 1 / 3, dtype=torch.float64))
        # p = 1 / (2 + e^sink), so dp / dsink = -p^2 at 0.
        (gradient,) = torch.autograd.grad(y.sum(), sinks)
        assert_close(gradient, torch.tensor([-2 / 9], dtype=torch.float64))
    with torch.no_grad():
        spec = AttentionSpec(mask="full", sinks=torch.zeros(1))
        y = by("flex")(*(x.float() for x in (q, k, v)), spec)
    assert_close(y.flatten(), torch.full((2,), 1 / 3))


def test_sixteen_bits_are_close_to_the_exact_result():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 32, 2, 16, generator=generator).bfloat16() for _ in range(3))
    spec = AttentionSpec(sinks=torch.ones(2), soft_cap=3.0, window=(8, None))
    y, exact = by("naive")(q, k, v, spec), by("naive")(*(x.double() for x in (q, k, v)), spec)
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.01 * exact.norm()
