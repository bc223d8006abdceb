"""Attention by torch's flexible product equals the twin, and blocks hide only what is not seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.layers.attention.backends import flex
from megablocks_core.layers.attention.backends.boundaries import Boundaries
from tests.layers.attention.requests import KINDS, WINDOWS, by, kind, sums, tensors

CPU = torch.device("cpu")
# On the CPU it is said to be done in the open.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_equals_the_twin(name):
    check(kind(name, torch.float32), tensors())


@pytest.mark.parametrize("tokens", [3, 8])
def test_more_and_fewer_queries_than_keys_equal_the_twin(tokens):
    given = tensors(rows=2, tokens=tokens, keys=6, value_width=16)
    check(AttentionSpec(window=(2, None), sinks=torch.ones(4)), given)


@pytest.mark.parametrize("name", ["window", "sinks", "documents with pads", "soft cap"])
def test_inside_a_compiled_function_nothing_changes(name):
    spec, given = kind(name, torch.float32), [x.detach().float() for x in tensors()]

    def attend(q, k, v):
        return attention(q, k, v, spec, backend="flex")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*given), attend(*given))


def test_masks_are_made_without_a_read(monkeypatch):
    # The check of boundaries is then that of other devices than the CPU.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        spec = AttentionSpec(
            cu_seqlens=torch.empty(3, dtype=torch.int32),
            cu_seqlens_padded=torch.empty(3, dtype=torch.int32),
        )
        mask = flex.block_mask(300, 300, spec, Boundaries(spec, 300), CPU)
    assert mask.kv_indices.shape == (1, 1, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "documents with pads", "soft cap"])
def test_compiled_to_a_kernel_of_the_processor_it_equals_the_twin(monkeypatch, name):
    """Which walks the lists of blocks: what no list holds is not seen."""
    given = tensors(tokens=300, width=16)
    spec = kind(name, torch.float32)
    if spec.cu_seqlens is not None:
        spec = AttentionSpec(cu_seqlens=sums([10, 130, 90]), cu_seqlens_padded=sums([20, 140, 130]))
    monkeypatch.setattr(flex, "_function", lambda compiled: flex._compiled())
    check(spec, given)


def test_f_100_pads_neither_attend_nor_are_attended():
    q, k, v = (x.detach().float() for x in tensors())
    for x in (q, k, v):
        x[:, [3, 6, 7]] = torch.nan
    spec = AttentionSpec(cu_seqlens=sums([3, 2]), cu_seqlens_padded=sums([4, 4]))
    y = attention(q, k, v, spec, backend="flex")
    assert not y[:, [3, 6, 7]].any()
    for start, stop in ((0, 3), (4, 6)):
        alone = by("naive")(*(x[:, start:stop] for x in (q, k, v)), AttentionSpec())
        assert_close(y[:, start:stop], alone)


@given(
    st.sampled_from(["causal", "full"]),
    WINDOWS,
    st.integers(1, 14),
    st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_blocks_are_those_of_the_whole_mask(mask, window, keys, rooms, extra):
    """Found from edges of blocks alone, with blocks of 4 tokens."""
    window = (window[0], window[1] if mask == "full" else None)
    options = {"mask": mask, "window": window}
    tokens = keys + extra - 1
    bounds = None
    if rooms is not None:
        lengths = [room - room // 3 for room in rooms]
        options |= {"cu_seqlens": sums(lengths), "cu_seqlens_padded": sums(rooms)}
        tokens = keys = sum(rooms) + extra
        bounds = Boundaries(AttentionSpec(**options), tokens)
    if tokens == 0:
        return
    spec = AttentionSpec(**options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(flex, "BLOCK", 4)
        found = flex.seen_blocks(tokens, keys, spec, bounds, CPU)
    seen = _seen(tokens, keys, spec, bounds)
    some, every = (_blocks(seen, reduce) for reduce in ("any", "all"))
    # A block may be listed where nothing of it is seen, not left out where something is.
    assert not (some & ~found.some_PQ).any()
    assert not (found.all_PQ & ~every).any()
    if rooms is None:
        assert torch.equal(found.all_PQ, every)


def test_most_blocks_of_short_documents_are_left_out():
    spec = AttentionSpec(cu_seqlens=sums([128] * 16))
    some, every = flex.seen_blocks(2048, 2048, spec, Boundaries(spec, 2048), CPU)
    assert torch.equal(some, torch.eye(16, dtype=torch.bool))
    assert not every.any()  # a causal block is seen in part
    spec = AttentionSpec(mask="full", cu_seqlens=sums([256] * 8))
    some, every = flex.seen_blocks(2048, 2048, spec, Boundaries(spec, 2048), CPU)
    assert torch.equal(some, every)
    assert some.sum() == 32


def _seen(tokens, keys, spec, bounds):
    t, s = torch.arange(tokens).unsqueeze(1), torch.arange(keys)
    left, right = spec.limits
    if bounds is None:
        return torch.ones(tokens, keys, dtype=torch.bool) & _ahead(
            s - t - keys + tokens, left, right
        )
    own = bounds.document_T.unsqueeze(1) == bounds.document_T
    outside = bounds.outside_T.unsqueeze(1) | bounds.outside_T
    return own & ~outside & _ahead(s - t, left, right)


def _ahead(ahead, left, right):
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    return seen if right is None else seen & (ahead <= right)


def _blocks(seen, reduce):
    tokens, keys = seen.shape
    padded = F.pad(seen, (0, -keys % 4, 0, -tokens % 4), value=reduce == "all")
    blocks = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)
    return getattr(blocks, reduce)(-1)


def check(spec, given):
    """Outputs of float32 against the twin's of float64."""
    given = [x.detach() for x in given]
    exact = AttentionSpec(
        **{**vars(spec), "sinks": None if spec.sinks is None else spec.sinks.double()}
    )
    found = attention(*(x.float() for x in given), spec, backend="flex")
    assert_close(found.double(), by("naive")(*given, exact), rtol=0, atol=1e-5)
