"""Each collective has the gradient of one process, where another with the same forward fails."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    all_gather_to,
    all_to_all,
    chunk_slice,
    copy_slices_to,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from megablocks_core.groups.messages import learn_sizes, sum_flat
from megablocks_core.testing import ranks

_TOKENS = [8, 5, 2]  # even; uneven; fewer than four ranks, so that some hold nothing


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _own(length, group):
    return chunk_slice(length, group.size, group.rank)


def _gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


def _differ(ours, theirs):
    return ours.numel() > 0 and not torch.allclose(ours, theirs, atol=1e-6)


@ranks(1, 2, 4)
def test_copy_to_sums_the_gradients_of_work_on_own_features():
    group = _world()
    x, w = _random(3).requires_grad_(), _random(8, 3, seed=1)
    right = _gradient((w @ x).square().sum(), x)
    own_w = w[_own(8, group)]

    def loss(enter):
        return reduce_from((own_w @ enter(x)).square().sum(), group=group)

    assert_close(_gradient(loss(lambda x: copy_to(x, group=group)), x), right)
    assert group.size == 1 or _differ(_gradient(loss(lambda x: x), x), right)


@ranks(1, 2, 4)
def test_reduce_from_passes_the_gradient_of_the_whole_on():
    group = _world()
    w, x = _random(3, 8, seed=1), _random(8)
    own = _own(8, group)
    own_w = w[:, own].clone().requires_grad_()
    w.requires_grad_()
    right = _gradient((w @ x).square().sum(), w)[:, own]

    def loss(leave):
        return leave(own_w @ x[own]).square().sum()

    def both_ways(y):
        return reduce_from(copy_to(y, group=group), group=group)

    assert_close(_gradient(loss(lambda y: reduce_from(y, group=group)), own_w), right)
    assert group.size == 1 or _differ(_gradient(loss(both_ways), own_w), right)


@ranks(1, 2, 4)
@pytest.mark.parametrize("tokens", _TOKENS)
def test_gather_from_keeps_the_own_slice_of_the_gradient(tokens):
    group = _world()
    x = _random(2, tokens, 3)
    own_x = x[:, _own(tokens, group)].clone().requires_grad_()
    x.requires_grad_()
    right = _gradient(x.square().sum() ** 2, x)[:, _own(tokens, group)]

    def loss(gather):
        whole = gather(own_x, dim=1, group=group)
        assert torch.equal(whole, x)
        return whole.square().sum() ** 2

    assert_close(_gradient(loss(gather_from), own_x), right)
    wrong = _gradient(loss(all_gather_to), own_x)
    assert group.size == 1 or own_x.numel() == 0 or _differ(wrong, right)


@ranks(1, 2, 4)
@pytest.mark.parametrize("tokens", _TOKENS)
def test_all_gather_to_sums_the_gradients_of_work_on_own_features(tokens):
    group = _world()
    x, w = _random(2, tokens, 3), _random(8, 3, seed=1)
    own_x = x[:, _own(tokens, group)].clone().requires_grad_()
    own_w = w[_own(8, group)]
    x.requires_grad_()
    right = _gradient((x @ w.T).square().sum(), x)[:, _own(tokens, group)]

    def loss(gather):
        y = gather(own_x, dim=1, group=group) @ own_w.T
        return reduce_from(y.square().sum(), group=group)

    assert_close(_gradient(loss(all_gather_to), own_x), right)
    wrong = _gradient(loss(gather_from), own_x)
    assert group.size == 1 or own_x.numel() == 0 or _differ(wrong, right)


@ranks(1, 2, 4)
@pytest.mark.parametrize("tokens", _TOKENS)
def test_scatter_to_gathers_the_gradients_of_all_tokens(tokens):
    group = _world()
    x = _random(2, tokens, 3).requires_grad_()
    right = _gradient(x.square().sum(), x)

    def loss(scatter):
        return reduce_from(scatter(x, dim=1, group=group).square().sum(), group=group)

    def narrow(x, *, dim, group):
        own = _own(tokens, group)
        return x.narrow(dim, own.start, own.stop - own.start)

    assert_close(_gradient(loss(scatter_to), x), right)
    assert group.size == 1 or _differ(_gradient(loss(narrow), x), right)


@ranks(1, 2, 4)
@pytest.mark.parametrize("tokens", _TOKENS)
def test_reduce_scatter_to_gathers_the_gradients_of_all_tokens(tokens):
    group = _world()
    w, x = _random(3, 8, seed=1), _random(2, tokens, 8)
    features, own = _own(8, group), _own(tokens, group)
    own_w = w[:, features].clone().requires_grad_()
    w.requires_grad_()
    right = _gradient((x @ w.T).square().sum(), w)[:, features]

    def loss(leave):
        y = leave(x[..., features] @ own_w.T, dim=1, group=group)
        assert_close(y, (x @ w.T)[:, own])
        return reduce_from(y.square().sum(), group=group)

    def reduce_and_narrow(y, *, dim, group):
        return reduce_from(y, group=group).narrow(dim, own.start, own.stop - own.start)

    assert_close(_gradient(loss(reduce_scatter_to), own_w), right)
    assert group.size == 1 or _differ(_gradient(loss(reduce_and_narrow), own_w), right)


@ranks(1, 2, 4)
def test_all_to_all_sends_gradients_back_where_rows_came_from():
    """Uneven and empty splits: rank r sends r + s rows to rank s, and none to itself."""
    group = _world()
    size, me = group.size, group.rank
    counts = [[0 if r == s else r + s for s in range(size)] for r in range(size)]
    if size == 1:
        counts = [[3]]
    receive = [counts[r][me] for r in range(size)]
    x = _random(sum(counts[me]), 2, seed=me).requires_grad_()

    y = all_to_all(x, send=counts[me], receive=receive, group=group)
    expected = []
    for r in range(size):
        rows = _random(sum(counts[r]), 2, seed=r)
        start = sum(counts[r][:me])
        expected.append(rows[start : start + counts[r][me]])
    assert torch.equal(y, torch.cat(expected))
    # Weights that depend on the receiver show that gradients come back from the right rank.
    dx = _gradient((y * (me + 1)).sum(), x)
    weights = torch.cat([torch.full((counts[me][s], 2), float(s + 1)) for s in range(size)])
    assert_close(dx, weights.double())


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.uint8])
def test_all_to_all_serves_other_dtypes(dtype):
    group = _world()
    x = torch.arange(3, dtype=dtype) + 10 * group.rank
    y = all_to_all(x, send=[1, 2], receive=[1 + group.rank] * 2, group=group)
    assert y.tolist() == ([0, 10] if group.rank == 0 else [1, 2, 11, 12])


@ranks(1, 2, 4)
def test_f_016_weights_used_on_own_tokens_hold_the_sum(tokens=4):
    """A norm weight under sequence parallelism: [1, 0] and [2, 0] sum to [3, 0] (case F-016)."""
    group = _world()
    w, bias = _random(2).requires_grad_(), _random(2, seed=1).requires_grad_()
    own = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0], [0.5, 0.5]][: group.size])
    with CommDebugMode() as traffic:
        shared_w, shared_bias = copy_to(w, bias, group=group)
        ((shared_w + shared_bias) * own[group.rank]).sum().backward()
    assert_close(w.grad, own.sum(0).double())
    assert_close(bias.grad, own.sum(0).double())
    assert traffic.get_total_counts() == (group.size > 1)


@ranks(2, 4)
def test_copy_to_sends_even_where_a_rank_used_only_some_tensors():
    group = _world()
    w, unused = _random(2).requires_grad_(), _random(3).requires_grad_()
    shared_w, shared_unused = copy_to(w, unused, group=group)
    used = shared_w.sum() if group.rank == 0 else shared_w.sum() * 0 + shared_unused.sum()
    used.backward()
    assert_close(w.grad, torch.ones(2, dtype=torch.float64))
    assert_close(unused.grad, torch.full((3,), group.size - 1.0, dtype=torch.float64))


@ranks(2, 4)
def test_copy_to_sums_sixteen_bit_weight_gradients_in_float32():
    group = _world()
    w, other = (torch.zeros(1, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    shared, _ = copy_to(w, other, group=group)
    # 256 + 1 rounds to 256 in bfloat16: a sum in bfloat16 would lose every small part.
    shared.backward(torch.tensor([256.0 if group.rank == 0 else 1.0], dtype=torch.bfloat16))
    total = torch.tensor([256.0 + group.size - 1]).bfloat16()
    assert torch.equal(w.grad, total) and w.grad.dtype == torch.bfloat16


@ranks(4)
def test_copy_slices_to_sums_over_the_neighbours_that_hold_a_slice():
    group = _world()
    spec = ShardSpec(0, group, (Segment(4), Segment(2, parts=2), Segment(1, parts=1)))
    w = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)  # own row, half, shared row
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with CommDebugMode() as traffic:
        shared, shared_bias = copy_slices_to(w, bias, specs=[spec, spec])
        ((shared.sum(1) + shared_bias) * float(10**group.rank)).sum().backward()
    half = 11.0 if group.rank < 2 else 1100.0
    expected = torch.tensor([float(10**group.rank), half, 1111.0], dtype=torch.float64)
    assert_close(w.grad, expected[:, None].expand(3, 2))
    assert_close(bias.grad, expected)
    assert traffic.get_total_counts() == 1


@ranks(2)
def test_collectives_have_second_derivatives():
    group = _world()
    x = _random(4, 3).requires_grad_()

    def function(x):
        y = reduce_scatter_to(copy_to(x, group=group) ** 3, dim=0, group=group)
        return reduce_from(all_gather_to(y, dim=0, group=group).sum(), group=group)

    (dx,) = torch.autograd.grad(function(x), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert ddx.abs().sum() > 0


@ranks(2)
def test_nothing_the_caller_sees_is_changed_in_place():
    group = _world()
    x = _random(4, 3)
    before = x.clone()
    for collective in (gather_from, all_gather_to, scatter_to, reduce_scatter_to):
        collective(x, dim=0, group=group)
    reduce_from(x, group=group)
    group.all_reduce(x, "max")
    group.broadcast(x, source=1)
    sum_flat([x, x], group=group)
    assert torch.equal(x, before)


def test_alone_every_collective_is_the_identity():
    x = _random(4, 3)
    for collective in (gather_from, all_gather_to, scatter_to, reduce_scatter_to):
        assert collective(x, dim=0, group=LOCAL) is x
    assert copy_to(x, group=LOCAL) is x
    assert copy_to(x, x, group=LOCAL) == (x, x)
    assert reduce_from(x, group=LOCAL) is x
    assert all_to_all(x, send=[4], receive=[4], group=LOCAL) is x


@ranks(2)
def test_known_sizes_save_the_message_that_learns_them():
    group = _world()
    x = _random(3 - group.rank, 2)
    with CommDebugMode() as traffic:
        gather_from(x, dim=0, group=group, sizes=[3, 2])
    assert traffic.get_total_counts() == 1
    with CommDebugMode() as traffic:
        gather_from(x, dim=0, group=group)
    assert traffic.get_total_counts() == 2
    assert learn_sizes(x, dim=0, group=group) == [3, 2]


@ranks(2)
def test_sizes_that_are_not_the_slices_raise():
    group = _world()
    with pytest.raises(ValueError, match="sizes="):
        gather_from(_random(3, 2), dim=0, group=group, sizes=[2, 2])
    with pytest.raises(ValueError, match="add up to 3"):
        scatter_to(_random(3, 2), dim=0, group=group, sizes=[2, 2])


@ranks(1, 2)
@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((), -1), ((4,), 1), ((4,), -2), ((4, 2), 2)])
def test_a_dimension_that_x_has_not_raises(shape, dim):
    """Alone too, so that what runs in one process runs on many."""
    group = _world()
    for collective in (gather_from, all_gather_to, scatter_to, reduce_scatter_to):
        with pytest.raises(
            ValueError, match=rf"dim={dim} must be a dimension .* {re.escape(str(shape))}"
        ):
            collective(torch.ones(shape), dim=dim, group=group)


@pytest.mark.parametrize("dim", [0.5, "0", None])
def test_a_dimension_that_is_no_number_raises(dim):
    for collective in (gather_from, all_gather_to, scatter_to, reduce_scatter_to):
        with pytest.raises(ValueError, match=f"dim={dim!r} must be a dimension of x"):
            collective(torch.ones(2, 2), dim=dim, group=LOCAL)


@ranks(1, 2)
def test_rows_to_send_that_do_not_fit_raise():
    group = _world()
    ones, more = [1] * group.size, [1] * (group.size + 1)
    with pytest.raises(ValueError, match="send=.* must add up to the 5 rows of x"):
        all_to_all(torch.ones(5, 2), send=ones, receive=ones, group=group)
    for wrong in ({"send": more, "receive": ones}, {"send": ones, "receive": more}):
        with pytest.raises(
            ValueError, match=f"must have one number for each of {group.size} ranks"
        ):
            all_to_all(torch.ones(group.size, 2), group=group, **wrong)
    with pytest.raises(ValueError, match="x of shape .. must have rows"):
        all_to_all(torch.ones(()), send=ones, receive=ones, group=group)


@ranks(1, 2)
def test_compiled_collectives_equal_eager_ones():
    group = _world()
    w = _random(4, 4, seed=1).requires_grad_()

    def function(x, w):
        y = copy_to(x, group=group) @ w
        y = reduce_scatter_to(y, dim=0, group=group)
        y = all_gather_to(y, dim=0, group=group, sizes=[y.shape[0]] * group.size)
        y = scatter_to(reduce_from(y, group=group), dim=1, group=group)
        y = gather_from(y, dim=1, group=group, sizes=[y.shape[1]] * group.size)
        half = [2] * group.size if group.size > 1 else [4]
        return all_to_all(y, send=half, receive=half, group=group).square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = _random(4, 4).requires_grad_()
    eager = torch.autograd.grad(function(x, w), (x, w))
    traced = torch.autograd.grad(compiled(x, w), (x, w))
    for ours, theirs in zip(traced, eager, strict=True):
        assert_close(ours, theirs)
