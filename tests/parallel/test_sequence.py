"""A cut of a sequence gives each rank its tokens, their places and their documents."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.parallel import wrong_arguments as no
from tests.traffic import Traffic

KINDS = ("contiguous", "zigzag")


def _rank(rank, size):
    """A group that is asked for arithmetic alone."""
    return Group(tuple(range(size)), rank=rank) if size > 1 else LOCAL


@st.composite
def _cuts(draw):
    """A kind, ranks, lengths of documents, and tokens behind the last."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    return draw(st.sampled_from(KINDS)), draw(st.integers(1, 5)), lengths, draw(st.integers(0, 4))


def _tokens(lengths, behind):
    """(document, place in it) of every token; those behind have document E."""
    documents = [*enumerate(lengths), (len(lengths), behind)]
    return [(document, place) for document, length in documents for place in range(length)]


def _sums(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@given(_cuts())
@example(("zigzag", 4, [1], 0))
@example(("contiguous", 4, [0, 0, 5, 0], 0))
def test_ranks_hold_each_token_once_with_its_document_and_place(drawn):
    kind, size, lengths, behind = drawn
    tokens = _tokens(lengths, behind)
    whole, ranks_of = [], {}
    cuts = [_cut(kind, size, rank, lengths, behind) for rank in range(size)]
    for rank, cut in enumerate(cuts):
        held = [list(range(start, stop)) for start, stop in cut.pieces]
        mine = [index for piece in held for index in piece]
        whole += mine
        ranks_of |= dict.fromkeys(mine, rank)
        assert cut.local_length == len(mine) == cut.local_lengths[rank]
        assert cut.positions.tolist() == [tokens[index][1] for index in mine]
        _check_documents(cut, held, tokens, len(lengths))
        assert cuts[0].pieces_of(rank) == cut.pieces
    assert sorted(whole) == list(range(len(tokens)))
    for cut in cuts:
        for (start, stop), (before, behind) in zip(cut.pieces, cut.neighbours, strict=True):
            assert before == ranks_of.get(start - 1)
            assert behind == ranks_of.get(stop)
        in_order = [cuts[rank].pieces[piece] for rank, piece in cut.order]
        assert [index for span in in_order for index in range(*span)] == sorted(whole)


def _cut(kind, size, rank, lengths, behind):
    total = sum(lengths) + behind
    return SequenceCut(total, cu_seqlens=_sums(lengths), group=_rank(rank, size), kind=kind)


def _check_documents(cut, pieces, tokens, num_documents):
    """The sums of lengths are those of counting each document's tokens in each piece."""
    counts = [
        [sum(tokens[index][0] == document for index in piece) for document in range(num_documents)]
        for piece in pieces
    ]
    for index, count in enumerate(counts):
        assert cut.piece_cu_seqlens(index).tolist() == _sums(count).tolist()
    assert cut.local_cu_seqlens.tolist() == _sums([n for count in counts for n in count]).tolist()


@given(_cuts())
def test_without_documents_places_are_those_of_the_sequence(drawn):
    kind, size, lengths, behind = drawn
    total = sum(lengths) + behind
    for rank in range(size):
        cut = SequenceCut(total, group=_rank(rank, size), kind=kind)
        assert cut.positions.tolist() == [
            i for start, stop in cut.pieces for i in range(start, stop)
        ]
        assert cut.local_cu_seqlens is None and cut.piece_cu_seqlens(0) is None


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    pieces = [SequenceCut(16, group=_rank(rank, 2), kind="zigzag").pieces for rank in range(2)]
    assert pieces == [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]
    earlier = [sum(i for start, stop in held for i in range(start, stop)) for held in pieces]
    assert earlier[0] == earlier[1]
    assert SequenceCut(16, kind="zigzag").pieces == [(0, 16)]


@ranks(1, 2, 4)
def test_tokens_are_cut_and_joined_with_adjoint_gradients():
    group = Mesh(cp=dist.get_world_size()).group("cp")
    for kind in KINDS:
        for length in (0, 1, 3, 8, 11):
            for dim in (1, -2):
                _check_cut_and_joined(SequenceCut(length, group=group, kind=kind), dim)


def _check_cut_and_joined(cut, dim):
    whole = torch.arange(2.0 * cut.length * 3, dtype=torch.float64).view(2, cut.length, 3)
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    slope = (whole + 1).sin()
    x = whole.clone().requires_grad_()
    part = cut.shard(x, dim)
    assert_close(part, whole[:, mine], rtol=0, atol=0)
    part.backward(slope[:, mine])
    assert_close(x.grad, slope, rtol=0, atol=0)

    part = whole[:, mine].clone().requires_grad_()
    joined = cut.unshard(part, dim)
    assert_close(joined, whole, rtol=0, atol=0)
    joined.backward(slope)
    assert_close(part.grad, slope[:, mine], rtol=0, atol=0)
    assert_close(cut.in_order(cut.by_rank(whole, dim), dim), whole, rtol=0, atol=0)


@ranks(2)
def test_traffic_follows_the_table():
    """``docs/traffic.md``: one all-gather of the whole, in backward or in forward."""
    for kind in KINDS:
        cut = SequenceCut(8, group=Mesh(cp=2).group("cp"), kind=kind)
        for move, length, forth, back in ((cut.shard, 8, 0, 1), (cut.unshard, 4, 1, 0)):
            x = torch.ones(3, length, 5, requires_grad=True)
            with Traffic() as forward:
                y = move(x, 1)
            with Traffic() as backward:
                y.sum().backward()
            for traffic, number in ((forward, forth), (backward, back)):
                assert traffic.totals() == ({"all_gather": (1, 3 * 8 * 5)} if number else {})


@ranks(2)
def test_labels_and_rows_are_cut_alike():
    cut = SequenceCut(7, group=Mesh(cp=2).group("cp"), kind="zigzag")
    labels = torch.arange(7)
    with Traffic() as traffic:
        mine = cut.shard(labels, 0)
    assert mine.tolist() == cut.positions.tolist() and mine.dtype == torch.int64
    assert traffic.counts() == {}
    with Traffic() as traffic:
        assert cut.unshard(mine, 0).tolist() == labels.tolist()
    assert traffic.totals() == {"all_gather": (1, 8)}


@given(_cuts(), _cuts())
@example(("contiguous", 1, [4, 5, 7], 0), ("contiguous", 1, [5, 3, 8], 0))
@example(("contiguous", 1, [5], 0), ("contiguous", 1, [5, 0], 0))
def test_digests_tell_cuts_apart(one, other):
    plans = [(kind, sum(lengths) + behind, lengths) for kind, _, lengths, behind in (one, other)]
    like = torch.zeros((), dtype=torch.float32)
    digests = [_cut(*drawn[:2], 0, *drawn[2:]).digest(like) for drawn in (one, other)]
    assert (digests[0] == digests[1]) == (plans[0] == plans[1])
    for digest in digests:
        assert digest.dtype == torch.float32 and 0 <= digest < 2**24 and digest % 1 == 0


def test_one_plan_has_one_digest_on_every_rank_and_in_every_dtype():
    digests = {
        SequenceCut(9, cu_seqlens=_sums([2, 5], sums), group=_rank(rank, 2))
        .digest(torch.zeros(3, dtype=dtype))
        .item()
        for rank in range(2)
        for sums in (torch.int32, torch.int64)
        for dtype in (torch.float32, torch.float64)
    }
    assert len(digests) == 1


@ranks(1, 2, 4)
def test_ranks_compare_their_cuts():
    group = Mesh(cp=dist.get_world_size()).group("cp")
    odd = group.rank == group.size - 1
    for kind in KINDS:
        with Traffic() as traffic:
            SequenceCut(9, cu_seqlens=_sums([2, 5]), group=group, kind=kind).check_alike()
        assert traffic.totals() == ({"all_gather": (1, group.size)} if group.size > 1 else {})
    for length, sums, kind in (
        (9 + odd, None, "zigzag"),
        (9, _sums([2 + odd, 5]), "zigzag"),
        (9, None if odd else _sums([2, 5]), "zigzag"),
        (9, None, KINDS[odd]),
    ):
        cut = SequenceCut(length, cu_seqlens=sums, group=group, kind=kind)
        if group.size == 1:
            cut.check_alike()
            continue
        with pytest.raises(ValueError, match="^cut=.* the same length, kind and cu_seqlens"):
            cut.check_alike()


def test_wrong_arguments_are_refused():
    wrong = {
        "length": (None, -1, 1.5, "8", True),
        "cu_seqlens": (
            *([0, 8], 8, torch.tensor([0.0, 8.0]), torch.tensor([[0, 8]]), torch.tensor([0])),
            *(torch.tensor([1, 8]), torch.tensor([0, 5, 4]), torch.tensor([0, 9])),
        ),
        "group": no.NO_GROUPS,
        "kind": (None, "ring", 1, "Zigzag"),
    }
    no.refused(SequenceCut, {"length": 8}, wrong, besides=("device",))
    cut = SequenceCut(8, group=_rank(0, 2))
    whole, part = torch.zeros(2, 8), torch.zeros(2, 4)
    for call in (cut.shard, cut.by_rank, cut.in_order):
        no.each_refused(lambda x, call=call: call(x, 1), "x", (part, torch.zeros(8), None))
        no.each_refused(lambda dim, call=call: call(whole, dim), "dim", (0, 2, -3, None))
    no.each_refused(lambda x: cut.unshard(x, 1), "x", (whole, torch.zeros(4), None))


def test_a_layer_says_which_kinds_it_serves():
    zigzag = SequenceCut(8, group=_rank(0, 2), kind="zigzag")
    with pytest.raises(ValueError, match="kind='zigzag' .* must be contiguous for Attention"):
        zigzag.require("contiguous", by="Attention")
    zigzag.require("contiguous", "zigzag", by="Mamba2")
    SequenceCut(8, kind="zigzag").require("contiguous", by="Attention")


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_made_without_a_look_at_values(kind):
    with FakeTensorMode():
        sums = torch.zeros(4, dtype=torch.int32)
        cut = SequenceCut(10, cu_seqlens=sums, group=_rank(1, 2), kind=kind)
        assert cut.positions.shape == (cut.local_length,)
        assert cut.local_cu_seqlens.shape == (len(cut.pieces) * 3 + 1,)
        assert cut.local_cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_many_packings_and_lengths(kind):
    def plan(length, sums):
        cut = SequenceCut(length, cu_seqlens=sums, group=_rank(1, 2), kind=kind)
        return cut.positions, cut.local_cu_seqlens

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(plan, fullgraph=True, backend=counter)
    for index in range(20):
        lengths = [index % 5 + 3, 17 - index % 7, index % 3]
        for got, right in zip(
            compiled(sum(lengths), _sums(lengths)), plan(sum(lengths), _sums(lengths)), strict=True
        ):
            assert_close(got, right, rtol=0, atol=0)
    assert counter.frame_count <= 3
