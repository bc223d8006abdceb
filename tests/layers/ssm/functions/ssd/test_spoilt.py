"""What is not finite in one document stays in it."""

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.layers.ssm.functions.ssd import spoilt, ssd_chunk_scan
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks

F64 = torch.float64
# Documents share chunks of 4 tokens; one is empty, and 2 tokens lie behind the last.
BOUNDS = [0, 3, 5, 5, 9, 14]
SUMS, LENGTH = torch.tensor(BOUNDS), 16
PARTS = list(zip(BOUNDS, [*BOUNDS[1:], LENGTH], strict=True))
TOKENS = ("x", "dt", "B", "C")


def inputs():
    shapes = {"x": (4, 3), "dt": (4,), "B": (2, 5), "C": (2, 5)}
    given = {name: torch.randn(1, LENGTH, *shape, dtype=F64) for name, shape in shapes.items()}
    given["dt"] = given["dt"].abs()
    return given, -torch.rand(4, dtype=F64), torch.randn(len(BOUNDS) - 1, 4, 3, 5, dtype=F64)


def check(spoil, part, cut=None):
    """All but one document, whose tokens ``spoil`` changes, are those of the recurrence."""
    given, A, state = inputs()
    right, right_final = ssd_recurrence(**given, A=A, initial_state=state, cu_seqlens=SUMS)
    own = torch.arange(LENGTH) if cut is None else cut.shard(torch.arange(LENGTH), 0)
    good = (own < part[0]) | (own >= part[1])
    spoil(given, state, part)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    sharded = leaves if cut is None else {name: cut.shard(x, 1) for name, x in leaves.items()}
    documents = {"cu_seqlens": SUMS} if cut is None else {"cut": cut}
    y, final = ssd_chunk_scan(**sharded, A=A, initial_state=state, chunk_size=4, **documents)
    assert final is not None
    assert_close(y[0, good], right[0, own[good]], rtol=0, atol=1e-10)
    assert y[0, own == part[1] - 1].isnan().all()
    others = torch.tensor([document != part for document in PARTS[:-1]])
    whole = final if cut is None else cut.group.all_reduce(final.detach().clone())
    assert_close(whole[others], right_final[others], rtol=0, atol=1e-10)
    assert not whole[~others].isfinite().any()
    y[0, good].sum().backward()
    bad = torch.arange(part[0], part[1])
    for name, x in leaves.items():
        assert x.grad is not None
        assert x.grad[0].index_fill(0, bad, 0).isfinite().all(), name


def spoil_tokens(name, value):
    def spoil(given, state, part):
        given[name][0, part[0]] = value

    return spoil


def spoil_state(given, state, part):
    state[PARTS.index(part)] = torch.nan


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_spoil_their_own_document(name, value):
    for part in (part for part in PARTS if part[0] < part[1]):
        check(spoil_tokens(name, value), part)


def test_states_spoil_their_own_document():
    for part in ((0, 3), (3, 5), (9, 14)):
        check(spoil_state, part)


@ranks(2, 4)
def test_neighbours_keep_it_too():
    cp = Mesh(cp=torch.distributed.get_world_size()).group("cp")
    for kind in ("contiguous", "zigzag"):
        cut = SequenceCut(LENGTH, cu_seqlens=SUMS, group=cp, kind=kind)
        for part in ((0, 3), (3, 5), (9, 14)):
            check(spoil_tokens("x", torch.nan), part, cut)
            check(spoil_state, part, cut)


def test_nothing_is_copied_where_nothing_is_spoilt():
    given, _, state = inputs()
    assert spoilt.find(list(given.values()), SUMS, state, None) is None


def test_tokens_before_the_first_bad_one_are_kept():
    given, *_ = inputs()
    given["dt"][0, 11] = torch.inf
    found = spoilt.find(list(given.values()), SUMS, None, None)
    assert found is not None
    assert found.tokens.nonzero().flatten().tolist() == [11, 12, 13]
    assert found.documents.tolist() == [False, False, False, False, True]
