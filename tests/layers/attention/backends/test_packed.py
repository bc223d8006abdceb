"""Documents of one row, one after another, alone and as one operator for compilers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.layers.attention.backends.packed import _operator
from megablocks_core.layers.attention.dropping import Dropped, index_of_heads
from megablocks_core.parallel import DropoutKey
from tests.layers.attention.requests import F64, KINDS, by, kind, results, sums, tensors


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
@pytest.mark.parametrize("name", KINDS)
def test_the_operator_of_compilers_computes_the_same(name, backend):
    spec, given = kind(name), tensors()
    if backend == "sdpa" and spec.soft_cap is not None:
        return
    found = results(lambda *all: _operator(*all, backend), given, spec)
    assert_close(found, results(by(backend), given, spec), rtol=0, atol=1e-12)


def test_the_operator_is_one_that_torch_accepts():
    """Its shapes without data, its gradients and its schema, as torch's own check has them."""
    q, k, v = tensors(tokens=6, value_width=4)
    sinks = torch.zeros(4, dtype=F64, requires_grad=True)
    arguments = (q, k, v, sinks, sums([2, 4]), None, None, "causal", [3, -1], None, None)
    torch.library.opcheck(
        torch.ops.megablocks_core.packed_attention.default, (*arguments, 0.0, "", "sdpa")
    )


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_windows_and_packings_of_any_length_compile_once_and_change_nothing(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, cu_seqlens):
        spec = AttentionSpec(cu_seqlens=cu_seqlens, window=(3, None))
        rows = attention(q, k, v, AttentionSpec(window=(3, None)), backend=backend)
        return rows + attention(q, k, v, spec, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ([3, 4], [5, 1, 6], [2, 2, 9, 1], [20]):
        given, bounds = tensors(tokens=sum(lengths) + 1), AttentionSpec(cu_seqlens=sums(lengths))
        found, expected = (
            results(lambda q, k, v, spec, f=f: f(q, k, v, spec.cu_seqlens), given, bounds)
            for f in (compiled, attend)
        )
        assert_close(found, expected, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


def test_documents_drop_as_they_do_alone():
    given = tensors(tokens=9)
    index = DropoutKey(1, 2).index(torch.zeros(1, 1).long(), torch.arange(9))
    words = index_of_heads(index, slice(0, 4))
    spec = {"window": (4, None), "sinks": torch.ones(4, dtype=F64)}
    packed = AttentionSpec(
        **spec,
        cu_seqlens=sums([4, 3]),
        cu_seqlens_padded=sums([5, 4]),
        dropout=Dropped(0.4, "a", words),
    )
    y = by("auto")(*given, packed)
    assert not y[:, [4, 8]].any()
    for start, stop in ((0, 4), (5, 8)):
        own = Dropped(0.4, "a", words[:, start:stop])
        alone = by("naive")(*(x[:, start:stop] for x in given), AttentionSpec(**spec, dropout=own))
        assert_close(y[:, start:stop], alone)
        assert not torch.equal(alone, by("naive")(
            *(x[:, start:stop] for x in given), AttentionSpec(**spec)))  # fmt: skip
