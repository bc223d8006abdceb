"""Products of one input with several weights equal plain ones, at every shape and freeze."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import linear
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel import ColumnParallelLinear
from megablocks_core.parallel.tensor.products import column_products
from megablocks_core.testing import ranks

_FEATURES = 6


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _input(kind):
    """Inputs of all sorts; each has a number of tokens that two and four ranks divide."""
    return {
        "one token": _random(_FEATURES),
        "no tokens": _random(0, _FEATURES),
        "no batch": _random(3, 0, 4, _FEATURES),
        "tokens": _random(4, _FEATURES),
        "four dims": _random(2, 1, 8, _FEATURES),
        "transposed": _random(_FEATURES, 4).T,
        "strided": _random(8, 2 * _FEATURES)[::2, ::2],
        "expanded": _random(1, _FEATURES).expand(4, _FEATURES),
    }[kind]


_KINDS = [
    "one token",
    "no tokens",
    "no batch",
    "tokens",
    "four dims",
    "transposed",
    "strided",
    "expanded",
]


def _parameters(group, frozen):
    """Own rows of two weights, one with a bias, and the whole ones; some of them frozen."""
    wholes = [_random(8, _FEATURES, seed=1), _random(4, _FEATURES, seed=2), _random(8, seed=3)]
    wholes = [x.requires_grad_(index not in frozen) for index, x in enumerate(wholes)]
    owns = [
        x.detach()[chunk_slice(len(x), group.size, group.rank)]
        .clone()
        .requires_grad_(x.requires_grad)
        for x in wholes
    ]
    return owns, wholes


def _backward(ys, dys):
    graded = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    torch.autograd.backward(*zip(*graded, strict=True))


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (2,), (0, 1, 2)])
def test_every_shape_and_freeze_equals_plain_products(frozen, sequence_parallel):
    """Non-contiguous inputs, one token without a batch, no tokens at all."""
    group = _world()
    for kind in _KINDS:
        for needs_dx in (True, False):
            whole_x = _input(kind)
            if not (needs_dx or len(frozen) < 3) or (sequence_parallel and whole_x.dim() < 2):
                continue
            cut = chunk_slice(whole_x.shape[-2] if whole_x.dim() > 1 else 1, group.size, group.rank)
            x = whole_x[..., cut, :] if sequence_parallel else whole_x
            x = x.detach().requires_grad_(needs_dx)
            x_ref = whole_x.detach().clone().requires_grad_(needs_dx)
            owns, wholes = _parameters(group, frozen)
            ys = column_products(
                x, owns[:2], [owns[2], None], group=group, sequence_parallel=sequence_parallel
            )
            refs = linear(x_ref, wholes[0], wholes[2]), linear(x_ref, wholes[1])
            dys = [_random(*ref.shape, seed=4) for ref in refs]
            _backward(refs, dys)
            own = [chunk_slice(y.shape[-1], group.size, group.rank) for y in refs]
            _backward(ys, [dy[..., rows] for dy, rows in zip(dys, own, strict=True)])

            for y, ref, rows in zip(ys, refs, own, strict=True):
                assert_close(y, ref[..., rows], atol=1e-10, rtol=0, msg=kind)
            if needs_dx:
                assert x_ref.grad is not None
                dx = x_ref.grad[..., cut, :] if sequence_parallel else x_ref.grad
                assert_close(x.grad, dx, atol=1e-10, rtol=0, msg=kind)
            for share, whole in zip(owns, wholes, strict=True):
                rows = chunk_slice(len(whole), group.size, group.rank)
                expected = None if whole.grad is None else whole.grad[rows]
                assert (share.grad is None) == (expected is None), kind
                if expected is not None:
                    assert_close(share.grad, expected, atol=1e-10, rtol=0, msg=kind)


@ranks(2)
def test_one_token_without_a_batch_is_refused_under_sequence_parallelism():
    layer = ColumnParallelLinear(8, 16, sequence_parallel=True, group=_world())
    with pytest.raises(ValueError, match=r"x of shape \(8,\) must have tokens along dim -2"):
        layer(torch.ones(8))


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_frozen_weight_saves_no_input_and_still_passes_gradients(sequence_parallel):
    group = _world()
    layer = ColumnParallelLinear(12, 8, sequence_parallel=sequence_parallel, group=group)
    layer.requires_grad_(False)
    saved = []
    x = torch.ones(4, 12, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        CommDebugMode() as traffic,
    ):
        layer(x).sum().backward()

    assert {t.data_ptr() for t in saved} <= {p.data_ptr() for p in layer.parameters()}
    assert traffic.get_total_counts() == (2 if sequence_parallel else 1)
    assert x.grad is not None and layer.weight.grad is None


@ranks(2, 4)
def test_saved_for_backward_is_the_local_input_and_the_parameter_itself():
    group = _world()
    layer = ColumnParallelLinear(12, 8, sequence_parallel=True, group=group)
    x = torch.ones(4, 12, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    bytes_saved = sum(t.nbytes for t in saved if t.data_ptr() != layer.weight.data_ptr())
    assert any(t.data_ptr() == layer.weight.data_ptr() for t in saved)
    assert bytes_saved == x.nbytes + layer.bias.nbytes


@ranks(2)
def test_a_second_derivative_raises():
    layer = ColumnParallelLinear(4, 8, group=_world())
    x = torch.ones(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
