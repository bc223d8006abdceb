"""Train a tensor-parallel feed-forward layer and check it against one process.

Run with ``torchrun --nproc-per-node 2 examples/tp_mlp.py``, or alone with ``python``.
"""

import os

import torch
import torch.distributed as dist

from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.layers import GatedMLP
from megablocks_core.parallel import clip_grad_norm_


def train(tp: Group, steps: int = 20) -> list[float]:
    """Fit the layer to a fixed target; the losses, one a step."""
    torch.manual_seed(0)  # One seed gives one model, however it is cut.
    layer = GatedMLP(64, 256, tp=tp, dtype=torch.float64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x_TH = torch.randn(128, 64, dtype=torch.float64)
    losses = []
    for _ in range(steps):
        loss = (layer(x_TH) - x_TH.roll(1, dims=-1)).square().mean()
        loss.backward()
        clip_grad_norm_(layer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train over all ranks, then in one process, and compare."""
    if "RANK" not in os.environ:
        losses = train(LOCAL)
    else:
        dist.init_process_group("gloo")
        losses = train(Mesh(tp=dist.get_world_size()).group("tp"))
    alone = train(LOCAL)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, equal to one process")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
