"""``fully_shard`` against torch's FSDP2 alone, with the same units, on two ranks.

A step is a forward pass, a square loss, a backward pass and an SGD step of a stack of MLP blocks.
"""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks import peers
from benchmarks.timing import Work, on_ranks, report, take_turns
from megablocks_core.groups import Group
from megablocks_core.parallel import fully_shard

_NAME = "parallel/fully_shard"
_PEER = "torch FSDP2"
_CASES = (
    {"hidden": 256, "layers": 4, "tokens": 512},
    {"hidden": 512, "layers": 4, "tokens": 512},
)


class _Stack(nn.Module):
    """Residual MLP blocks."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        for layer in self.layers:
            x_TH = x_TH + layer(x_TH)
        return x_TH


def bench_step(group: Group) -> None:
    """A training step, with and without early gathers."""
    for case in _CASES:
        torch.manual_seed(0)
        whole = _Stack(case["hidden"], case["layers"])
        peer = _torch_sharded(deepcopy(whole), group)
        for prefetch in (True, False):
            ours = fully_shard(deepcopy(whole), group=group, prefetch=prefetch)
            x_TH = torch.randn(case["tokens"], case["hidden"])
            steps = [_step(net, x_TH) for net in (ours, peer)]
            for step in steps:
                step()
            peers.assert_equal_gradients(ours, peer)
            times = take_turns(*steps, group=group)
            report(
                times,
                benchmark=_NAME,
                peer=_PEER,
                case=case | {"prefetch": str(prefetch)},
                limit=1.03,
                group=group,
            )


def _torch_sharded(net: _Stack, group: Group) -> nn.Module:
    mesh = init_device_mesh("cpu", (group.size,))
    for layer in net.layers:
        torch_fully_shard(layer, mesh=mesh)
    torch_fully_shard(net, mesh=mesh)
    return net


def _step(net: nn.Module, x_TH: Tensor) -> Work:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)

    def step() -> None:
        optimizer.zero_grad()
        net(x_TH).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    """Print one JSON line a case."""
    torch.set_num_threads(1)
    on_ranks(bench_step)


if __name__ == "__main__":
    main()
