"""Train over data-parallel ranks, the model whole on each or cut over them, and check the losses.

Run with ``torchrun --nproc-per-node 2 examples/fsdp_train.py``, or alone with ``python``.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.optim import AdamW

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.layers import GatedMLP
from megablocks_core.parallel import DataParallel, ShardedOptimizer, clip_grad_norm_, fully_shard


def train(mode: str, group: Group, steps: int = 20) -> list[float]:
    """Fit two layers to a fixed target; the losses over all ranks' rows, one a step."""
    torch.manual_seed(0)  # The same weights and rows on every rank.
    model = torch.nn.Sequential(*(GatedMLP(64, 128, dtype=torch.float64) for _ in range(2)))
    if mode == "DataParallel":
        model = DataParallel(model, group=group, reduction="sum")
    elif mode == "fully_shard":
        fully_shard(model, group=group, reduction="sum", units="*")  # each layer is a unit
    if mode == "ShardedOptimizer":
        optimizer = ShardedOptimizer(model, AdamW, group=group, zero=2, reduction="sum", lr=1e-2)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-2)
    x_tH = torch.randn(128, 64, dtype=torch.float64)[group.rank :: group.size]
    losses = []
    for _ in range(steps):
        loss = (model(x_tH) - x_tH.roll(1, dims=-1)).square().sum() / (128 * 64)
        loss.backward()  # The sums over the ranks are gradients of the mean over all rows.
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(group.all_reduce(loss.detach()).item())
    return losses


def main() -> None:
    """Train over all ranks, then in one process, and compare."""
    modes = ("DataParallel", "ShardedOptimizer", "fully_shard")
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=modes, default="fully_shard")
    mode = parser.parse_args().mode
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    group = Mesh().group("dp")
    losses = train(mode, group)
    torch.testing.assert_close(losses, train(mode, LOCAL), rtol=0, atol=1e-9)
    if group.rank == 0:
        print(f"{mode}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, equal to one process")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
