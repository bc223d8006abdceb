"""The protocol is told apart by its methods."""

import torch

from megablocks_core.ckpt.state.logical import LogicalOptimizer
from tests.ckpt.flat_optimizer import FlatAdam


def test_an_optimizer_that_publishes_its_state_is_known():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert isinstance(FlatAdam([[parameter]]), LogicalOptimizer)
    assert not isinstance(torch.optim.SGD([parameter]), LogicalOptimizer)
