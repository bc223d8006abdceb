"""A recurrence of three lines, told as ``Recurrence`` wants it, runs in chunks."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.chunked.recurrence import Recurrence
from megablocks_core.layers.ssm.functions.chunked.scan import recurrence_of, register
from megablocks_core.layers.ssm.functions.chunked.sequence import over_sequence


def _forward(inputs, _, state, way, outputs):
    """Sums of all tokens before, and of the token itself."""
    found, behind = [], []
    for index in range(inputs[0].shape[1]):
        found.append(way.enter(index, state)[:, None] + inputs[0][:, index].cumsum(1))
        state = found[-1][:, -1]
        behind.append(state)
    return (torch.stack(found, dim=1) if outputs else None), behind


def _backward(inputs, _, state, way, dy, dstate):
    grads = torch.empty_like(dy)
    for index in reversed(range(dy.shape[1])):
        dstate = way.behind(index, dstate)
        grads[:, index] = dy[:, index].flip(1).cumsum(1).flip(1) + dstate[:, None]
        dstate = way.before(index, dstate + dy[:, index].sum(1))
    return [grads], [], dstate


def test_a_recurrence_of_ones_own():
    sums = Recurrence(0, _forward, _backward, lambda *_: None, torch.mul)  # pyright: ignore
    register("sums", sums)
    assert recurrence_of("sums") is sums
    x = torch.randn(1, 10, 2, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([0, 4, 4, 9])
    y, final = over_sequence(
        "sums",
        (x,),
        state_shape=(2,),
        dtype=torch.float64,
        chunk_size=3,
        cu_seqlens=documents,
    )
    wanted = [part.cumsum(1) for part in x.split([4, 5, 1], dim=1)]
    assert_close(y, torch.cat(wanted, dim=1))
    assert final is not None
    assert_close(final, torch.stack([wanted[0][0, -1], torch.zeros(2).double(), wanted[1][0, -1]]))
    for ours, right in zip(
        torch.autograd.grad(y.sin().sum() + final.sum(), x),
        torch.autograd.grad(
            torch.cat(wanted, dim=1).sin().sum() + sum(w[0, -1].sum() for w in wanted[:2]), x
        ),
        strict=True,
    ):
        assert_close(ours, right)
