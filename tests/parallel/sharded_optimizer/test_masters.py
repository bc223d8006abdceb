"""Clipping sees all experts, and its factor reaches the float32 copies of 16-bit weights."""

import torch
from torch import nn

from megablocks_core.groups import Mesh, ShardSpec, mark
from megablocks_core.parallel import ShardedOptimizer, count_zeros
from megablocks_core.testing import ranks


class Scalars(nn.Module):
    """A replicated scalar, and a scalar that is this rank's expert."""

    def __init__(self, ep):
        super().__init__()
        self.dense = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        self.expert = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        mark(self, "expert", ShardSpec(0, ep), expert=True)

    def forward(self, scale):
        return scale * (self.dense + self.expert).sum()


@ranks(2)
def test_f046_experts_of_all_ranks_enter_norm_count_and_masters():
    """tp 2, ep 2, etp 1, dp 1: all gradients 1, then 0."""
    mesh = Mesh(tp=2, ep=2)
    model = Scalars(mesh.expert.group("ep"))
    rate, steps = 2**-8, 64
    optimizer = ShardedOptimizer(
        model,
        torch.optim.SGD,
        group=mesh.group("dp"),
        expert_group=mesh.expert.group("edp"),
        lr=rate,
    )
    for _ in range(steps):
        model(1.0).backward()
        norm = optimizer.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm.item(), 3**0.5, rtol=1e-6, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    # A step is 0.0011, less than half of what bfloat16 can tell below 1: the copies add them up.
    expected = torch.tensor(1 - steps * rate * 0.5 / 3**0.5)
    for weight in model.parameters():
        torch.testing.assert_close(weight.float(), expected.bfloat16().float().view(1))
    model(0.0).backward()
    assert count_zeros(model) == 3
