"""Recurrences in chunks are the recurrences: rows, documents and ranks' pieces of either."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm.functions.chunked import scan
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.layers.ssm.functions.chunked.kinds import KINDS, states, sums
from tests.traffic import Traffic

_close = partial(assert_close, rtol=0, atol=1e-9)
_gradient = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)


def _found(function, leaves, state, **options):
    """Outputs, last states and gradients in everything."""
    y, final = function(leaves, initial_state=state, **options)
    given = leaves if state is None else [*leaves, state]
    # The loop over no token leads back to nothing.
    loss = 0 * sum(x.sum() for x in given)
    loss = loss + (y * (y.detach() + 1)).sum() + (final * (final.detach() + 2)).sum()
    return y, final, *_gradient(loss, given)


@st.composite
def _cases(draw):
    """A kind, a chunk size, lengths (of documents or of rows), tokens behind, and states."""
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    return (
        draw(st.sampled_from(list(KINDS))),
        draw(st.integers(1, 9)),
        lengths if packed else lengths[0],
        draw(st.integers(0, 5)) if packed else 0,
        draw(st.booleans()),
    )


# Documents that start at the first token of a chunk of 4, one before and one behind it; empty
# ones; nothing at all.
_EXAMPLES = [
    ([4, 4, 5], 0),
    ([3, 4, 6], 2),
    ([5, 4, 3], 1),
    ([0, 4, 0, 0, 7, 0], 3),
    ([0], 0),
    ([0, 0], 3),
    (0, 0),
    (13, 0),
]


def _with_examples(test):
    for kind in ("selective", "delta 1", "delta 3"):
        for lengths, behind in _EXAMPLES:
            for with_state in (True, False):
                test = example((kind, 4, lengths, behind, with_state))(test)
    return test


@_with_examples
@given(_cases())
def test_outputs_states_and_gradients_are_those_of_the_recurrence(case):
    name, chunk_size, lengths, behind, with_state = case
    kind = KINDS[name]
    torch.manual_seed(0)
    packed = isinstance(lengths, list)
    rows, total = (1, sum(lengths) + behind) if packed else (2, lengths)
    leaves = kind.leaves(rows, total)
    state = states(kind, len(lengths) if packed else rows) if with_state else None
    options = {"cu_seqlens": sums(lengths) if packed else None}
    ours = _found(partial(kind.run, chunk_size=chunk_size), leaves, state, **options)
    for mine, right in zip(ours, _found(kind.twin, leaves, state, **options), strict=True):
        _close(mine, right)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_differences(name, packed):
    kind = KINDS[name]
    torch.manual_seed(0)
    lengths, rows = ([2, 0, 3], 1) if packed else (None, 1)
    leaves = [*kind.leaves(rows, 6 if packed else 5), states(kind, 3 if packed else rows)]

    def run(*leaves):
        options = {"cu_seqlens": sums(lengths) if packed else None, "chunk_size": 4}
        return kind.run(leaves[:-1], initial_state=leaves[-1], **options)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_chunks_are_joined(name, monkeypatch):
    """More tokens than are computed at once, with and without documents."""
    monkeypatch.setattr(scan, "_BLOCK", 8)
    kind = KINDS[name]
    torch.manual_seed(0)
    leaves = kind.leaves(1, 30)
    for lengths in (None, [8, 0, 15, 6]):
        options = {"cu_seqlens": None if lengths is None else sums(lengths)}
        state = states(kind, 1 if lengths is None else len(lengths))
        right = _found(kind.twin, leaves, state, **options)
        for chunk_size in (3, 4, 16):
            run = partial(kind.run, chunk_size=chunk_size)
            for mine, other in zip(_found(run, leaves, state, **options), right, strict=True):
                _close(mine, other)


@pytest.mark.parametrize("name", KINDS)
def test_nothing_of_another_document_gets_through(name):
    """A token that is no number, in the outputs, states and gradients of others."""
    kind = KINDS[name]
    torch.manual_seed(0)
    leaves = kind.leaves(1, 20)
    state = torch.zeros(4, *kind.state, dtype=torch.float64)
    state[0] = torch.nan
    for leaf, entries in zip(leaves, kind.entries, strict=True):
        for token, value in ((2, torch.nan), (13, torch.inf), (18, torch.nan)):
            if entries:
                leaf.data[:, entries * token : entries * (token + 1)] = value
    options = {"cu_seqlens": sums([3, 9, 3, 3]), "chunk_size": 4, "initial_state": state}
    y, final = kind.run(leaves, **options)
    assert y[:, 3:12].isfinite().all() and final[1].isfinite().all()
    assert y[:, 2].isnan().any() and final[0].isnan().any()
    grads = torch.autograd.grad(y[:, 3:12].sum() + final[1].sum(), leaves)
    for grad, entries in zip(grads, kind.entries, strict=True):
        if entries:
            assert grad[:, 3 * entries : 12 * entries].isfinite().all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_are_computed_in_float32(name, dtype):
    kind = KINDS[name]
    torch.manual_seed(0)
    leaves = kind.leaves(1, 150, dtype)
    state = torch.zeros(2, *kind.state)
    options = {"cu_seqlens": sums([70, 80])}
    y, final, *grads = _found(kind.run, leaves, state.requires_grad_(), **options)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = _found(kind.twin, exact, state.detach().double().requires_grad_(), **options)
    assert y.dtype == dtype and final.dtype == grads[-1].dtype == torch.float32
    assert all(grad.dtype == dtype for grad in grads[:-1])
    assert (final.double() - right[1]).norm() < 1e-5 * right[1].norm()
    for mine, other in zip((y, *grads), (right[0], *right[2:]), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (mine.double() - other).norm() < tolerance * other.norm()


def test_no_states_are_made_for_training():
    for kind in KINDS.values():
        leaves = kind.leaves(1, 8)
        for lengths in (None, [3] + [0] * 6):
            options = {"cu_seqlens": None if lengths is None else sums(lengths)}
            y, final = kind.run(leaves, return_final_state=False, **options)
            assert final is None
            kept = _kept(kind, leaves, return_final_state=False, **options)
            assert not any(x.dim() == 1 + len(kind.state) and len(x) == 7 for x in kept)
            for mine, right in zip(
                _gradient(y.sum(), leaves), _twin_grads(kind, leaves, options), strict=True
            ):
                _close(mine, right)


def _twin_grads(kind, leaves, options):
    return _gradient(kind.twin(leaves, **options)[0].sum(), leaves)


def _kept(kind, leaves, **options):
    """What is saved for backward, each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = kind.run(leaves, **options)
    assert result is not None
    return list(kept.values())


@pytest.mark.parametrize("name", KINDS)
def test_no_value_is_read_on_the_host(name):
    kind = KINDS[name]
    with FakeTensorMode():
        leaves, state = kind.leaves(1, 9), states(kind, 2)
        documents = torch.zeros(3, dtype=torch.int64)
        for options in (
            {},
            {"cu_seqlens": documents},
            {"cu_seqlens": documents, "initial_state": state},
        ):
            y, final = kind.run(leaves, **options)
            (y.sum() + final.sum()).backward()
            assert y.shape[:2] == (1, 9) and final.shape == (2 if options else 1, *kind.state)


@pytest.mark.parametrize(("name", "with_state"), [("selective", True), ("delta 2", False)])
def test_one_graph_serves_many_packings(name, with_state):
    kind = KINDS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")

    def run(leaves, state, documents):
        return kind.run(leaves, initial_state=state, cu_seqlens=documents, chunk_size=4)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for index in range(20):
        lengths = [index % 5, 3 + index % 7, 9]
        leaves = kind.leaves(1, sum(lengths) + index % 3)
        state = states(kind, 3) if with_state else None
        results = []
        for function in (run, compiled):
            y, final = function(leaves, state, sums(lengths))
            results.append((y, final, *_gradient(y.sin().sum() + final.sin().sum(), leaves)))
        for ours, right in zip(*results, strict=True):
            assert_close(ours, right, rtol=0, atol=1e-12)
    assert counter.frame_count <= 3


def test_wrong_sequences_are_refused():
    for kind in KINDS.values():
        leaves, two = kind.leaves(1, 8), kind.leaves(2, 8)
        wrong = torch.zeros(2, *kind.state)
        for size in (0, -1):
            with pytest.raises(ValueError, match=f"chunk_size={size} must be "):
                kind.run(leaves, chunk_size=size)
        with pytest.raises(ValueError, match=r"initial_state of shape .* must have shape \(1, "):
            kind.run(leaves, initial_state=wrong)
        with pytest.raises(ValueError, match=r"initial_state of shape .* must have shape \(3, "):
            kind.run(leaves, initial_state=wrong, cu_seqlens=sums([2, 3, 3]))
        with pytest.raises(ValueError, match="cu_seqlens must come with one row"):
            kind.run(two, cu_seqlens=sums([8]))
        with pytest.raises(
            ValueError, match=r"cu_seqlens=\[0, 9\] must start at 0, never fall, and end within"
        ):
            kind.run(leaves, cu_seqlens=sums([9]))
        with pytest.raises(ValueError, match="cu_seqlens must not come with a cut"):
            kind.run(leaves, cu_seqlens=sums([8]), cut=SequenceCut(8))


# Documents of 16 tokens, so that they begin at a rank's first token, one before and one behind.
_PACKINGS = [([4, 4, 8], 0), ([3, 5, 8], 0), ([5, 2, 6], 3), ([0, 12, 0, 3], 1), ([2, 0, 1], 0)]


@ranks(2, 4)
@pytest.mark.parametrize("cut_kind", ["contiguous", "zigzag"])
def test_ranks_that_hold_pieces_give_what_one_process_gives(cut_kind):
    torch.manual_seed(0)
    group = Mesh(cp=dist.get_world_size()).group("cp")
    cases = [*_PACKINGS, *((rows, 0) for rows in (11, 3, 0))]
    for name in ("selective", "delta 2"):
        for number, (lengths, behind) in enumerate(cases):
            _check_over_ranks(KINDS[name], group, cut_kind, lengths, behind, number % 3 > 0)


def _check_over_ranks(kind, group, cut_kind, lengths, behind, with_state):
    packed = isinstance(lengths, list)
    rows, total = (1, sum(lengths) + behind) if packed else (2, lengths)
    documents = sums(lengths) if packed else None
    leaves = kind.leaves(rows, total)
    state = states(kind, len(lengths) if packed else rows) if with_state else None
    whole = _summed(kind.twin, leaves, state, cu_seqlens=documents)
    cut = SequenceCut(total, cu_seqlens=documents, group=group, kind=cut_kind)
    mine = [
        _of_rank(x, n, cut).detach().requires_grad_() if n else x for x, n in _each(kind, leaves)
    ]
    with Traffic() as traffic:
        ours = _summed(partial(kind.run, chunk_size=2), mine, state, cut=cut)
    _close(ours[0], _of_rank(whole[0], 1, cut))
    _close(group.all_reduce(ours[1]), whole[1])
    grads = list(zip(ours[2:], whole[2:], strict=True))
    for (ours_grad, right), entries in zip(grads, (*kind.entries, 0), strict=False):
        if entries:
            _close(ours_grad, _of_rank(right, entries, cut))
        else:
            _close(group.all_reduce(ours_grad), right)
    assert traffic.counts() == {"all_gather": 1, "reduce_scatter": 1}
    # A transition, a state and a digest of every piece, whatever its length.
    pair = rows * (math.prod(kind.state) + math.prod(kind.transition))
    size = group.size * len(cut.pieces) * (pair + 1)
    assert all(sizes == [size] for sizes in traffic.sizes.values())


def _summed(function, leaves, state, **options):
    """As ``_found``, with a loss that is a sum over ranks' tokens and states."""
    y, final = function(leaves, initial_state=state, **options)
    given = leaves if state is None else [*leaves, state]
    loss = 0 * sum(x.sum() for x in given) + y.sin().sum() + (final**2).sum()
    return y, final, *_gradient(loss, given)


def _each(kind, leaves):
    return zip(leaves, kind.entries, strict=True)


def _of_rank(x, entries, cut):
    return torch.cat([x[:, entries * start : entries * stop] for start, stop in cut.pieces], dim=1)
