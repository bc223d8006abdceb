"""Training by a sharded optimizer, and by its one-process twin that sees all tokens."""

from contextlib import nullcontext

import torch
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, gather_whole, load_whole
from megablocks_core.parallel import DataParallel, clip_grad_norm_
from megablocks_core.parallel.sharded_optimizer.sharded_optimizer import ShardedOptimizer
from tests.parallel.fsdp_models import Net, batch, loss_of

# So small that buckets cut parameters, and some ranks own padding only.
BUCKET_BYTES = 500


class Lion(torch.optim.Optimizer):
    """The sign of a mix of momentum and gradient: an optimizer of somebody else's."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mix = state["momentum"] * 0.9 + p.grad * 0.1
                p.sub_(mix.tanh() / (1 + 1 / state["count"]), alpha=group["lr"])
                state["momentum"].lerp_(p.grad, 0.01)


def train(net, optimizer, here, *, size, steps=range(5), micros=1, reduction="mean"):
    """Train on the tokens of the ranks ``here``, of ``size`` in all."""
    alone = len(here) == 1 and isinstance(optimizer, ShardedOptimizer)
    for step in steps:
        optimizer.zero_grad()
        batches = [[batch(step, micro, rank) for rank in range(size)] for micro in range(micros)]
        count = sum(int((one.labels >= 0).sum()) for row in batches for one in row)
        for micro, row in enumerate(batches):
            last = micro == micros - 1
            for rank in here:
                loss = loss_of(net, row[rank], count=count, reduction=reduction)
                with optimizer.no_sync() if alone and not last else nullcontext():
                    (loss / len(here) if reduction == "mean" else loss).backward()
        clip_grad_norm_(net, 0.5)
        optimizer.step()


def built(*, tp=LOCAL, ep=LOCAL, dtype=torch.float64):
    """A twin, and a net with the same weights cut over groups."""
    torch.manual_seed(0)
    twin = Net().to(dtype)
    net = Net(tp, ep).to(dtype)
    load_whole(net, gather_whole(twin))
    return twin, net


def assert_equal_training(
    optimizer_class=torch.optim.AdamW,
    *,
    group,
    expert_group=None,
    tokens=None,
    tp=LOCAL,
    ep=LOCAL,
    micros=1,
    reduction="mean",
    data_parallel=False,
    groups_of=None,
    hyperparameters=None,
    **options,
):
    """Five steps end with the weights of one process.

    ``tokens`` are the ranks that see different ones; without more, they hold the same experts.
    """
    hyperparameters = {"lr": 0.01} | (hyperparameters or {})
    tokens = group if tokens is None else tokens
    expert_group = tokens if expert_group is None else expert_group
    twin, net = built(tp=tp, ep=ep)
    names = dict(net.named_parameters())
    if data_parallel:
        net = DataParallel(net, group=group, expert_group=expert_group, reduction=reduction)
    optimizer = ShardedOptimizer(
        net,
        optimizer_class,
        group=group,
        expert_group=expert_group,
        reduction=reduction,
        bucket_bytes=BUCKET_BYTES,
        groups=groups_of and groups_of(net),
        **options,
        **hyperparameters,
    )
    peer = optimizer_class(groups_of(twin) if groups_of else twin.parameters(), **hyperparameters)
    train(net, optimizer, [tokens.rank], size=tokens.size, micros=micros, reduction=reduction)
    train(twin, peer, range(tokens.size), size=tokens.size, micros=micros, reduction=reduction)
    wanted = gather_whole(twin)
    for name, tensor in gather_whole(net).items():
        assert_close(tensor, wanted[name], rtol=0, atol=1e-10, msg=name)
    for name, parameter in net.named_parameters():
        assert parameter is names[name]
    return net, optimizer
