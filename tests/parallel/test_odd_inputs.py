"""Inputs that nobody plans for: no tokens, one token without a batch, strided memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, chunk_slice
from megablocks_core.layers import MLP, GatedMLP, LayerNorm, RMSNorm
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks

_H, _VOCABULARY = 8, 13


def _world() -> Group:
    return Group.of(dist.group.WORLD)


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _inputs():
    return {
        "one token": _random(_H),
        "no tokens": _random(0, _H),
        "no batch": _random(0, 3, _H),
        "empty rows": _random(2, 0, _H),
        "transposed": _random(_H, 4).T,
        "strided": _random(8, 2 * _H)[::2, ::2],
        "expanded": _random(1, _H).expand(4, _H),
    }


def _column(group):
    return ColumnParallelLinear(_H, 16, gather_output=True, group=group)


def _row(group):
    return RowParallelLinear(_H, 12, input_is_parallel=False, group=group)


def _mlp(group):
    return MLP(_H, 16, tp=group)


def _gated(group):
    return GatedMLP(_H, 16, bias=True, tp=group)


_LAYERS = {
    "column": _column,
    "row": _row,
    "mlp": _mlp,
    "gated": _gated,
    "rms norm": lambda group: RMSNorm(_H),
    "layer norm": lambda group: LayerNorm(_H),
}


class _AsGiven(nn.Module):
    """Lets the layer see its input strided as the test made it, behind a contiguous leaf."""

    def __init__(self, layer, like):
        super().__init__()
        self.layer, self.shape, self.strides = layer, like.shape, like.stride()

    def forward(self, x):
        length = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if x.numel() == 0:
            return self.layer(x)
        if 0 in self.strides:
            return self.layer(x[:1].expand(self.shape))
        memory = x.new_zeros(length)
        view = memory.as_strided(self.shape, self.strides)
        view.copy_(x)
        return self.layer(view)


def _loss(y):
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


@ranks(2, 4)
@pytest.mark.parametrize("kind", _LAYERS)
def test_layers_take_them_as_one_process_does(kind):
    for x in _inputs().values():

        def build(group, x=x):
            return _AsGiven(_LAYERS[kind](group), x)

        assert_parallel_equivalence(build, x, group=_world(), loss=_loss, same_start=True)


@ranks(2, 4)
def test_an_embedding_takes_ids_of_any_shape():
    """One id, none, ids of strided memory and of 32 bits."""
    group = _world()
    ids = torch.arange(12).view(3, 4) % _VOCABULARY
    torch.manual_seed(0)
    share = VocabParallelEmbedding(_VOCABULARY, _H, group=group)
    whole = share.to_embedding()
    for given in (ids[0, 0], ids[:0], ids[:, :0], ids.T, ids[::2, ::2], ids.int(), ids.flatten()):
        share.weight.grad = whole.weight.grad = None
        y, expected = share(given), whole(given)
        assert torch.equal(y, expected)
        for output in (y, expected):
            _loss(output).backward()
        assert_close(share.weight.grad, whole.weight.grad[share.rows])


@ranks(1, 2, 4)
def test_a_loss_takes_strided_logits_and_no_tokens():
    group = _world()
    columns = chunk_slice(_VOCABULARY, group.size, group.rank)
    whole_VT = _random(_VOCABULARY, 6)
    targets = torch.arange(6)
    for rows in (slice(0, 6), slice(0, 6, 2), slice(0, 0)):
        x_ref = whole_VT.T[rows].detach().requires_grad_()
        x = whole_VT.T[rows, columns].detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(x, targets[rows], reduction="sum", group=group)
        expected = nn.functional.cross_entropy(x_ref, targets[rows], reduction="sum")
        assert_close(loss, expected, atol=1e-10, rtol=0)
        loss.backward()
        expected.backward()
        assert_close(x.grad, x_ref.grad[:, columns], atol=1e-10, rtol=0)
    one = whole_VT[:, 0]
    loss = vocab_parallel_cross_entropy(one[columns], targets[3], vocab_size=13, group=group)
    assert_close(loss, vocab_parallel_cross_entropy(one, targets[3], group=LOCAL))
