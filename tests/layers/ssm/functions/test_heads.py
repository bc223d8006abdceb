"""Heads of whole sequences from pieces with all heads, and back; groups that do not divide."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from megablocks_core.groups import Group, Mesh
from megablocks_core.layers.ssm.functions.heads import repeat_groups, to_heads, to_tokens
from megablocks_core.layers.ssm.functions.recurrences import ssd_recurrence
from megablocks_core.parallel import SequenceCut
from megablocks_core.testing import ranks
from tests.traffic import Traffic

KINDS = ("contiguous", "zigzag")


@ranks(1, 2, 4)
def test_a_rank_gets_its_heads_of_all_tokens_and_gives_them_back():
    group = Mesh(cp=dist.get_world_size()).group("cp")
    for kind in KINDS:
        for length in (0, 1, 3, 8, 11):
            _check_moves(SequenceCut(length, group=group, kind=kind))


def _check_moves(cut):
    n, rank = cut.group.size, cut.group.rank
    shapes = ((2, cut.length, 4, 3), (2, cut.length, 8))
    wholes = [torch.arange(float(torch.Size(s).numel())).double().view(s) for s in shapes]
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    heads = [whole.chunk(n, dim=2)[rank] for whole in wholes]

    parts = [whole[:, mine].requires_grad_() for whole in wholes]
    moved = to_heads(*parts, cut=cut)
    for one, right in zip(moved, heads, strict=True):
        assert_close(one, right, rtol=0, atol=0)
    torch.autograd.backward(moved, [head.sin() for head in heads])
    for part in parts:
        assert_close(part.grad, part.detach().sin(), rtol=0, atol=0)

    heads = [head.clone().requires_grad_() for head in heads]
    back = to_tokens(*heads, cut=cut)
    for one, part in zip(back, parts, strict=True):
        assert_close(one, part.detach(), rtol=0, atol=0)
    torch.autograd.backward(back, [part.detach().sin() for part in parts])
    for head in heads:
        assert_close(head.grad, head.detach().sin(), rtol=0, atol=0)


@ranks(2, 4)
def test_one_message_for_all_tensors_of_a_dtype():
    n = dist.get_world_size()
    for kind in KINDS:
        cut = SequenceCut(8, group=Mesh(cp=n).group("cp"), kind=kind)
        length = cut.local_length
        x = torch.ones(2, length, 4, 3, requires_grad=True)
        dt = torch.ones(2, length, 8, requires_grad=True)
        other = torch.ones(2, length, 4, dtype=torch.float64, requires_grad=True)
        with Traffic() as forward:
            moved = to_heads(x, other, dt, cut=cut)
        assert [one.dtype for one in moved] == [torch.float32, torch.float64, torch.float32]
        with Traffic() as backward:
            sum(one.double().sum() for one in moved).backward()  # pyright: ignore
        for traffic in (forward, backward):
            assert traffic.sorted_sizes() == {
                "all_to_all": [2 * length * 4, 2 * length * (4 * 3 + 8)]
            }


@ranks(1, 2, 4)
@pytest.mark.parametrize("groups", [1, 2, 4, 12])
def test_heads_over_ranks_scan_whole_documents_with_the_groups_of_theirs(groups):
    torch.manual_seed(0)
    group = Mesh(cp=dist.get_world_size()).group("cp")
    lengths, heads = [3, 0, 4], 12
    sums = torch.tensor([0, *lengths]).cumsum(0)
    shapes = ((1, 9, heads, 2), (1, 9, heads), (1, 9, groups, 2), (1, 9, groups, 2))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x, dt, B, C = leaves
    A = -torch.rand(heads, dtype=torch.float64)
    right, _ = ssd_recurrence(x, dt.abs(), A, B, C, cu_seqlens=sums)
    grads = torch.autograd.grad(right.sin().sum(), leaves)

    cut = SequenceCut(9, cu_seqlens=sums, group=group, kind="zigzag")
    mine = [index for start, stop in cut.pieces for index in range(start, stop)]
    parts = [leaf[:, mine].detach().requires_grad_() for leaf in leaves]
    x, dt, B, C = parts
    B, C = (repeat_groups(part, cut=cut, num_heads=heads) for part in (B, C))
    x, dt, B, C = to_heads(x, dt.abs(), B, C, cut=cut)
    y, _ = ssd_recurrence(x, dt, A.chunk(group.size)[group.rank], B, C, cu_seqlens=sums)
    (y,) = to_tokens(y, cut=cut)
    assert_close(y, right[:, mine], rtol=0, atol=1e-9)
    for ours, one in zip(torch.autograd.grad(y.sin().sum(), parts), grads, strict=True):
        assert_close(ours, one[:, mine], rtol=0, atol=1e-9)


def _cut(size):
    return SequenceCut(8 * size, group=Group(tuple(range(size)), rank=0))


@pytest.mark.parametrize(
    ("groups", "size", "order"),
    [
        (2, 4, [0, 0, 1, 1]),
        (3, 2, [0, 0, 1, 1, 2, 2]),
        (4, 2, [0, 1, 2, 3]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_groups_are_repeated_no_more_than_ranks_ask(groups, size, order):
    x = torch.arange(float(groups)).expand(1, 8, groups)[..., None]
    repeated = repeat_groups(x, cut=_cut(size), num_heads=12)
    assert repeated[0, 0, :, 0].tolist() == order


def test_what_does_not_divide_is_refused():
    cut, x = _cut(4), torch.zeros(1, 8, 6, 2)
    with pytest.raises(ValueError, match=r"shape \(1, 8, 6, 2\) .* evenly over 4 ranks"):
        to_heads(x, cut=cut)
    for wrong in (torch.zeros(1, 7, 4), torch.zeros(8, 4)):
        with pytest.raises(ValueError, match="must have the 8 tokens"):
            to_heads(wrong, cut=cut)
        with pytest.raises(ValueError, match="must have 32 tokens"):
            to_tokens(wrong, cut=cut)
    with pytest.raises(ValueError, match="num_heads=8 must divide evenly into 6 groups"):
        repeat_groups(x, cut=cut, num_heads=8)
    with pytest.raises(ValueError, match="num_heads=6 must divide .* over 4 ranks"):
        repeat_groups(x, cut=cut, num_heads=6)


@ranks(2)
def test_one_graph_serves_many_lengths():
    torch._dynamo.reset()
    group = Mesh(cp=2).group("cp")

    def run(x, cut):
        return to_tokens(*to_heads(x, cut=cut), cut=cut)[0] + 1

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for length in range(40, 60):  # uneven ones too
        cut = SequenceCut(length, group=group, kind="zigzag")
        x = torch.randn(2, cut.local_length, 4, 3, requires_grad=True)
        y = compiled(x, cut)
        y.sum().backward()
        assert_close(y, x + 1)
        assert_close(x.grad, torch.ones_like(x))
    assert counter.frame_count <= 3
