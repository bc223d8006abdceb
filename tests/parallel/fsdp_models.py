"""A model with all kinds of parameters, and steps of it on ranks and in one process."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    all_gather_to,
    gather_whole,
    load_whole,
    mark,
    reduce_scatter_to,
)
from megablocks_core.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
    no_sync,
)

HIDDEN, VOCABULARY, EXPERTS = 6, 13, 4


class Experts(nn.Module):
    """Every expert sees every token, weighted by a router."""

    def __init__(self, ep: Group = LOCAL):
        super().__init__()
        self.ep = ep
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS // ep.size, HIDDEN, HIDDEN) / HIDDEN)
        mark(self, "up", ShardSpec(0, ep), each="experts.{}.up.weight", expert=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all experts: each rank its own, to the tokens of its ep group."""
        scores = self.router(x).softmax(-1)
        if self.ep.size > 1:
            x, scores = (all_gather_to(one, dim=0, group=self.ep) for one in (x, scores))
        own = scores.chunk(self.ep.size, -1)[self.ep.rank]
        y = torch.einsum("bth,ehi,bte->bti", x, self.up, own)
        return reduce_scatter_to(y, dim=0, group=self.ep) if self.ep.size > 1 else y


class Block(nn.Module):
    """Packed, column and row weights, experts, one frozen parameter, and two that may be idle."""

    def __init__(self, tp: Group = LOCAL, ep: Group = LOCAL):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        packed = (Segment(10), Segment(10))
        self.gate_up = ColumnParallelLinear(HIDDEN, 20, segments=packed, group=tp)
        self.down = RowParallelLinear(10, HIDDEN, group=tp)
        self.experts = Experts(ep)
        self.scale = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.rare = nn.Linear(HIDDEN, HIDDEN)
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        """Apply the block; ``rare`` is the caller's word."""
        y = self.norm(x) * self.scale
        gate, up = self.gate_up(y).chunk(2, -1)
        x = x + self.down(torch.sigmoid(gate) * up) + self.experts(y)
        return x + self.rare(y) if rare else x


class Net(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, tp: Group = LOCAL, ep: Group = LOCAL):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(tp, ep) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, rare: bool = False) -> Tensor:
        """Give logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rare)
        return self.head(x)


class Batch(NamedTuple):
    """Tokens of one rank in one micro-batch."""

    tokens: Tensor
    labels: Tensor
    rare: bool


def batch(step: int, micro: int, rank: int) -> Batch:
    """Rank 1 has no label in micro-batch 0; the rare layer runs on some ranks in later steps."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens, labels = torch.randint(VOCABULARY, (2, 2, 5), generator=generator)
    labels[0, : (step + rank) % 5] = -100
    if micro == 0 and rank == 1:
        labels[:] = -100
    return Batch(tokens, labels, rare=step > 0 and rank == micro)


def loss_of(net: nn.Module, of: Batch, *, count: int, reduction: str) -> Tensor:
    """A sum over a global count, or a mean over this rank's tokens."""
    logits = net(of.tokens, of.rare)
    if reduction == "sum":
        return cross_entropy(logits.flatten(0, 1), of.labels.flatten(), reduction="sum") / count
    return logits.square().mean()


def steps(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks_here: list[int],
    *,
    size: int,
    micros: int,
    reduction: str,
    number: int = 5,
) -> None:
    """Train on the tokens of ``ranks_here``, of ``size`` ranks in all."""
    for step in range(number):
        optimizer.zero_grad()
        for micro in range(micros):
            labels = [
                batch(step, micro, rank).labels for rank in range(size) for micro in range(micros)
            ]
            count = sum(int((one >= 0).sum()) for one in labels)
            for rank in ranks_here:
                loss = loss_of(net, batch(step, micro, rank), count=count, reduction=reduction)
                if reduction == "mean" and len(ranks_here) > 1:
                    loss = loss / size
                if micro < micros - 1 and len(ranks_here) == 1:
                    with no_sync(net):
                        loss.backward()
                else:
                    loss.backward()
        clip_grad_norm_(net, 0.5)
        optimizer.step()


def assert_equal_training(
    wrap: Callable[[nn.Module], nn.Module],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    group: Group,
    tp: Group = LOCAL,
    ep: Group = LOCAL,
    rank: int | None = None,
    size: int | None = None,
    micros: int = 1,
    reduction: str = "mean",
) -> None:
    """Five steps of a wrapped model, and of one process with all tokens, end alike."""
    torch.manual_seed(0)
    twin = Net().double()
    net = Net(tp, ep).double()
    load_whole(net, gather_whole(twin))
    names = [name for name, _ in net.named_parameters()]
    net = wrap(net)
    assert [name for name, _ in net.named_parameters()] == names
    rank, size = group.rank if rank is None else rank, group.size if size is None else size
    for module, here in ((net, [rank]), (twin, list(range(size)))):
        inner = optimizer(list(module.parameters()))
        steps(module, inner, here, size=size, micros=micros, reduction=reduction)
    wanted = gather_whole(twin)
    for name, tensor in gather_whole(net).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-10, msg=name)
    never = net.get_parameter("layers.0.never")
    assert never.grad is None
