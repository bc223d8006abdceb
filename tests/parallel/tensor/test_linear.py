"""Tensor-parallel linear layers have the outputs, gradients and traffic they promise."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    chunk_slice,
    gather_whole,
    load_whole,
    marks,
    whole_tensor,
)
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_linears,
    gather_features,
)
from megablocks_core.testing import ranks
from tests.traffic import Traffic

_PACKED = (Segment(8), Segment(4), Segment(4))  # q | k | v


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _seeded(build):
    torch.manual_seed(0)
    return build().double()


def _tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _own_tokens(x, group):
    return x[..., chunk_slice(x.shape[-2], group.size, group.rank), :].detach().clone()


def _assert_whole_gradients(layer, whole):
    """The layer's gradients, put together by its marks, are those of the whole layer."""
    expected = dict(whole.named_parameters())
    for name, parameter, specs in marks(layer):
        assert_close(whole_tensor(parameter.grad, specs), expected[name].grad, atol=1e-10, rtol=0)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("segments", [None, _PACKED])
def test_column_equals_one_whole_layer(sequence_parallel, segments):
    group = _world()
    whole = _seeded(lambda: nn.Linear(12, 16))
    layer = ColumnParallelLinear.from_linear(
        whole, segments=segments, sequence_parallel=sequence_parallel, group=group
    )
    x_TI = _tokens(2, 8, 12).requires_grad_()
    dy_TO = _tokens(2, 8, 16, seed=2)
    whole(x_TI).backward(dy_TO)
    rows = torch.cat([torch.arange(16)[part] for part in layer.spec.ranges(16)])

    x = (_own_tokens(x_TI, group) if sequence_parallel else x_TI.detach()).requires_grad_()
    y_To = layer(x)
    y_To.backward(dy_TO[..., rows])

    assert_close(y_To, whole(x_TI)[..., rows], atol=1e-10, rtol=0)
    expected = _own_tokens(x_TI.grad, group) if sequence_parallel else x_TI.grad
    assert_close(x.grad, expected, atol=1e-10, rtol=0)
    _assert_whole_gradients(layer, whole)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("input_is_parallel", [False, True])
@pytest.mark.parametrize("segments", [None, _PACKED])
def test_row_equals_one_whole_layer(sequence_parallel, input_is_parallel, segments):
    group = _world()
    whole = _seeded(lambda: nn.Linear(16, 12))
    layer = RowParallelLinear.from_linear(
        whole,
        segments=segments,
        input_is_parallel=input_is_parallel,
        sequence_parallel=sequence_parallel,
        group=group,
    )
    x_TI = _tokens(2, 8, 16).requires_grad_()
    dy_TO = _tokens(2, 8, 12, seed=2)
    whole(x_TI).backward(dy_TO)
    columns = torch.cat([torch.arange(16)[part] for part in layer.spec.ranges(16)])

    x = x_TI.detach()[..., columns] if input_is_parallel else x_TI.detach().clone()
    y = layer(x.requires_grad_())
    y.backward(_own_tokens(dy_TO, group) if sequence_parallel else dy_TO)

    expected_y = whole(x_TI).detach()
    assert_close(
        y,
        _own_tokens(expected_y, group) if sequence_parallel else expected_y,
        atol=1e-10,
        rtol=0,
    )
    expected_dx = x_TI.grad[..., columns] if input_is_parallel else x_TI.grad
    assert_close(x.grad, expected_dx, atol=1e-10, rtol=0)
    _assert_whole_gradients(layer, whole)


@ranks(1, 2, 4)
@pytest.mark.parametrize("segments", [None, _PACKED])
def test_gathered_column_output_is_whole_and_in_order(segments):
    whole = _seeded(lambda: nn.Linear(12, 16))
    layer = ColumnParallelLinear.from_linear(
        whole, segments=segments, gather_output=True, group=_world()
    )
    x_TI = _tokens(5, 12)
    dy_TO = _tokens(5, 16, seed=2)

    whole(x_TI).backward(dy_TO)
    y_TO = layer(x_TI)
    y_TO.backward(dy_TO)

    assert_close(y_TO, whole(x_TI), atol=1e-10, rtol=0)
    _assert_whole_gradients(layer, whole)


@ranks(2, 4)
@pytest.mark.parametrize("gather_output", [False, True])
def test_f_020_slices_that_neighbours_hold_sum_their_gradients(gather_output):
    """One key head on several ranks: each sees its own query heads only (case F-020)."""
    group = _world()
    whole = _seeded(lambda: nn.Linear(3, 1 + group.size, bias=True))
    segments = (Segment(1, parts=1), Segment(group.size))  # one shared row, one row a rank
    layer = ColumnParallelLinear.from_linear(
        whole, segments=segments, gather_output=gather_output, group=group
    )
    x_TI = _tokens(4, 3)
    contribution = [3.0, 5.0, 7.0, 11.0][: group.size]

    if gather_output:
        layer(x_TI)[:, 0].sum().mul(sum(contribution)).backward()
    else:
        layer(x_TI)[:, 0].sum().mul(contribution[group.rank]).backward()
    whole(x_TI)[:, 0].sum().mul(sum(contribution)).backward()

    assert_close(layer.weight.grad[0], whole.weight.grad[0], atol=1e-10, rtol=0)
    assert_close(layer.bias.grad[0], whole.bias.grad[0], atol=1e-10, rtol=0)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_on_one_input_equal_layers_apart(sequence_parallel):
    group = _world()
    wholes = [_seeded(lambda size=size: nn.Linear(12, size)) for size in (16, 8, 8)]
    layers = [
        ColumnParallelLinear.from_linear(whole, sequence_parallel=sequence_parallel, group=group)
        for whole in wholes
    ]
    x_TI = _tokens(8, 12)
    x_ref_TI = x_TI.clone().requires_grad_()
    for whole in wholes:
        whole(x_ref_TI).square().sum().backward()

    x = (_own_tokens(x_TI, group) if sequence_parallel else x_TI).requires_grad_()
    torch.stack([y.square().sum() for y in column_linears(x, *layers)]).sum().backward()

    expected = _own_tokens(x_ref_TI.grad, group) if sequence_parallel else x_ref_TI.grad
    assert_close(x.grad, expected, atol=1e-10, rtol=0)
    for layer, whole in zip(layers, wholes, strict=True):
        _assert_whole_gradients(layer, whole)


@ranks(2, 4)
@pytest.mark.parametrize("count", [1, 3])
def test_traffic_of_columns_does_not_grow_with_their_number(count):
    group = _world()
    layers = [ColumnParallelLinear(12, 8, group=group) for _ in range(count)]
    with CommDebugMode() as traffic:
        ys = column_linears(torch.ones(3, 12, requires_grad=True), *layers)
        assert traffic.get_total_counts() == 0
        torch.stack([y.sum() for y in ys]).sum().backward()
    assert traffic.get_total_counts() == 1

    layers = [
        ColumnParallelLinear(12, 8, sequence_parallel=True, group=group) for _ in range(count)
    ]
    with CommDebugMode() as traffic:
        ys = column_linears(torch.ones(3, 12, requires_grad=True), *layers)
        assert traffic.get_total_counts() == 1
        torch.stack([y.sum() for y in ys]).sum().backward()
    assert traffic.get_total_counts() == 3


@ranks(2)
def test_traffic_of_a_row_is_one_message_forward():
    group = _world()
    row = RowParallelLinear(8, 12, group=group)
    with CommDebugMode() as traffic:
        y_TO = row(torch.ones(3, 4, requires_grad=True))
        y_TO.sum().backward()
    assert traffic.get_total_counts() == 1

    for bias in (False, True):
        row = RowParallelLinear(8, 12, bias=bias, sequence_parallel=True, group=group)
        with CommDebugMode() as traffic:
            row(torch.ones(4, 4, requires_grad=True)).sum().backward()
        assert traffic.get_total_counts() == 2 + bias


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_one_seed_gives_one_layer(kind):
    """Initial values are the same bits at every group size, and from ``meta``."""
    torch.manual_seed(3)
    alone = kind(24, 16)
    torch.manual_seed(3)
    shared = kind(24, 16, group=_world())
    for name, tensor in gather_whole(shared).items():
        assert torch.equal(tensor, alone.get_parameter(name))

    shared.reset_parameters(seed=7, prefix="up.")
    late = kind(24, 16, group=_world(), device="meta").to_empty(device="cpu")
    late.reset_parameters(seed=7, prefix="up.")
    for name, tensor in gather_whole(late).items():
        assert torch.equal(tensor, gather_whole(shared)[name])


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_goes_to_its_share_and_back(kind, bias):
    whole = nn.Linear(8, 16, bias=bias, dtype=torch.bfloat16).requires_grad_(False).eval()
    share = kind.from_linear(whole, group=_world())
    back = share.to_linear()

    assert [name for name, _ in share.named_parameters()] == [
        n for n, _ in whole.named_parameters()
    ]
    assert not share.weight.requires_grad and not back.weight.requires_grad
    assert not share.training and not back.training
    for name, parameter in whole.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_layers_equal_eager_ones(sequence_parallel):
    group = _world()
    up = ColumnParallelLinear(8, 16, sequence_parallel=sequence_parallel, group=group).double()
    down = RowParallelLinear(16, 8, sequence_parallel=sequence_parallel, group=group).double()

    def block(x):
        return down(torch.relu(up(x)))

    x = _tokens(4, 8).requires_grad_()
    eager = torch.autograd.grad(block(x).square().sum(), [x, up.weight, down.weight, down.bias])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    traced = torch.autograd.grad(compiled(x).square().sum(), [x, up.weight, down.weight, down.bias])
    for ours, theirs in zip(traced, eager, strict=True):
        assert_close(ours, theirs, atol=1e-10, rtol=0)


@ranks(2)
def test_under_autocast_gradients_have_the_parameters_dtype():
    group = _world()
    up, down = ColumnParallelLinear(8, 16, group=group), RowParallelLinear(16, 8, group=group)
    x = torch.ones(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = down(up(x))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    grads = [x.grad, up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad]
    assert {grad.dtype for grad in grads} == {torch.float32}


@ranks(1, 2)
def test_load_whole_fills_this_ranks_share():
    whole = nn.Linear(8, 16)
    share = ColumnParallelLinear(8, 16, segments=[Segment(8), Segment(8)], group=_world())
    load_whole(share, whole.state_dict())
    for name, tensor in gather_whole(share).items():
        assert torch.equal(tensor, whole.get_parameter(name))


@ranks(4)
def test_sizes_that_do_not_divide_raise():
    group = _world()
    with pytest.raises(ValueError, match="out_features=6 must divide evenly over a group of 4"):
        ColumnParallelLinear(8, 6, group=group)
    with pytest.raises(ValueError, match="in_features=6 must divide evenly over a group of 4"):
        RowParallelLinear(6, 8, group=group)
    with pytest.raises(ValueError, match="must add up to 8 features"):
        ColumnParallelLinear(8, 8, segments=[Segment(4)], group=group)
    with pytest.raises(ValueError, match="a segment of out_features=6 must divide"):
        ColumnParallelLinear(8, 12, segments=[Segment(6), Segment(6)], group=group)
    with pytest.raises(ValueError, match="must not set parts"):
        RowParallelLinear(8, 8, segments=[Segment(8, parts=1)], group=group)


@ranks(2, 4)
@pytest.mark.parametrize("features", [7, 3])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_uneven_columns_equal_one_whole_layer(features, sequence_parallel):
    """Vocabularies of any size: with 3 features the last of 4 ranks holds none."""
    group = _world()
    whole = _seeded(lambda: nn.Linear(12, features))
    layer = ColumnParallelLinear.from_linear(
        whole, uneven=True, sequence_parallel=sequence_parallel, group=group
    )
    x_TI = _tokens(8, 12)
    x_ref_TI = x_TI.clone().requires_grad_()
    x = (_own_tokens(x_TI, group) if sequence_parallel else x_TI).requires_grad_()
    y_To = layer(x)
    with CommDebugMode() as traffic:
        y_TO = gather_features(y_To, layer.spec)
    assert traffic.get_total_counts() == 1
    y_TO.square().sum().backward()
    whole(x_ref_TI).square().sum().backward()
    expected = _own_tokens(x_ref_TI.grad, group) if sequence_parallel else x_ref_TI.grad
    assert_close(x.grad, expected, atol=1e-10, rtol=0)
    _assert_whole_gradients(layer, whole)


@ranks(2)
def test_tokens_that_do_not_divide_raise_under_sequence_parallelism():
    row = RowParallelLinear(8, 12, sequence_parallel=True, group=_world())
    with pytest.raises(ValueError, match="5 tokens"):
        row(torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"x of shape \(4,\) has no tokens along dim -2"):
        row(torch.ones(4))


@ranks(2)
def test_layers_that_disagree_on_what_is_sent_raise():
    group = _world()
    one = ColumnParallelLinear(8, 8, group=group)
    other = ColumnParallelLinear(8, 8, sequence_parallel=True, group=group)
    with pytest.raises(ValueError, match="agree on group and sequence_parallel"):
        column_linears(torch.ones(2, 8), one, other)


def test_alone_it_runs_the_kernels_of_a_linear_layer():
    layer = ColumnParallelLinear(8, 16)
    plain = nn.Linear(8, 16)
    x = torch.ones(4, 8)

    def kernels(module):
        with torch.profiler.profile() as profile:
            module(x).sum().backward()
        module.zero_grad()
        return [event.name for event in profile.events() if event.name.startswith("aten::")]

    assert kernels(layer) == kernels(plain)
    assert kernels(RowParallelLinear(8, 16)) == kernels(plain)


@ranks(2)
def test_a_copy_shares_the_group_and_computes_alike():
    layer = ColumnParallelLinear(8, 16, group=_world())
    twin = copy.deepcopy(layer)
    assert twin.group is layer.group
    assert torch.equal(twin(torch.ones(2, 8)), layer(torch.ones(2, 8)))
    assert ColumnParallelLinear(8, 16).group is LOCAL


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gathered_columns_send_their_features_once_more(sequence_parallel):
    group, tokens, features, outputs = _world(), 8, 6, 12
    layer = ColumnParallelLinear(
        features, outputs, gather_output=True, sequence_parallel=sequence_parallel, group=group
    )
    own = tokens // group.size if sequence_parallel else tokens
    x, forward = torch.ones(own, features, requires_grad=True), {}
    with Traffic() as traffic:
        y = layer(x)
        forward = traffic.totals()
        y.sum().backward()
    assert y.shape == (tokens, outputs)
    if not sequence_parallel:
        assert forward == {"all_gather": (1, tokens * outputs)}
        assert traffic.totals() == forward | {"all_reduce": (1, tokens * features)}
        return
    assert forward == {"all_gather": (2, tokens * (features + outputs))}
    gathers = {"all_gather": (3, tokens * (2 * features + outputs))}
    assert traffic.totals() == gathers | {"reduce_scatter": (1, tokens * features)}
