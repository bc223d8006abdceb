"""``ShardedOptimizer`` against torch's DDP with AdamW, two ranks, one thread each.

A step is a forward pass, a loss, a backward pass and AdamW's step; after five steps the weights are
first asserted to be equal but for rounding. The model is layers of a transformer's size in float32.
Torch's own ``ZeroRedundancyOptimizer``, which is cut by whole parameters, is timed too.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import peers
from benchmarks.timing import Work, on_ranks, report, take_turns
from megablocks_core.groups import Group
from megablocks_core.parallel import ShardedOptimizer

_NAME = "parallel/sharded_optimizer"
_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
_CASES = ({"hidden": 256, "tokens": 128}, {"hidden": 256, "tokens": 512})
_CASES += ({"hidden": 1024, "tokens": 256},)
_MODES = {"zero 1": {}, "zero 2": {"zero": 2}, "zero 1, overlap": {"overlap": True}}


def bench(group: Group) -> None:
    """Every mode against DDP, and ZeRO-1 against torch's own."""
    for case in _CASES:
        for mode, options in _MODES.items():
            _compare(group, case, mode, options, "torch DDP + AdamW", 1.1)
        _compare(group, case, "zero 1", {}, "torch DDP + ZeroRedundancyOptimizer", None)


def _compare(
    group: Group,
    case: dict[str, int],
    mode: str,
    options: dict[str, Any],
    peer: str,
    limit: float | None,
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*[_block(case["hidden"]) for _ in range(4)])
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(case["tokens"], case["hidden"], generator=generator)
    ours = deepcopy(whole)
    sharded = ShardedOptimizer(ours, torch.optim.AdamW, group=group, **options, **_ADAMW)
    theirs = DistributedDataParallel(whole, process_group=group.pg)
    if "Zero" in peer:
        adamw = ZeroRedundancyOptimizer(
            theirs.parameters(), torch.optim.AdamW, process_group=group.pg, **_ADAMW
        )
    else:
        adamw = torch.optim.AdamW(theirs.parameters(), **_ADAMW)
    steps = _step(ours, sharded, x), _step(theirs, adamw, x)
    for _ in range(5):
        for step in steps:
            step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        peers.assert_close_by_norm(mine.detach(), other.detach())
    times = take_turns(*steps, group=group)
    report(times, benchmark=_NAME, peer=peer, case={**case, "mode": mode}, limit=limit, group=group)


def _block(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(hidden),
        nn.Linear(hidden, 4 * hidden),
        nn.GELU(),
        nn.Linear(4 * hidden, hidden),
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Work:
    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    """Print one JSON line a case."""
    on_ranks(bench)


if __name__ == "__main__":
    main()
