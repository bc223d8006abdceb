"""Projections are built cut, and layers on one input share their messages."""

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Mesh, marks
from megablocks_core.layers.linear import apply_each, blank_linear, parallel_linear
from megablocks_core.parallel import ColumnParallelLinear, RowParallelLinear
from megablocks_core.testing import ranks


def test_modes_name_the_two_layers():
    assert isinstance(parallel_linear(4, 6, parallel_mode="column"), ColumnParallelLinear)
    assert isinstance(parallel_linear(4, 6, parallel_mode="row"), RowParallelLinear)


def test_blank_layers_lie_on_their_device_without_values():
    layer = blank_linear(4, 6, parallel_mode="column", dtype=torch.float64)
    assert torch.isnan(layer.get_parameter("weight")).all()  # The suite fills new memory with NaN.
    assert layer.weight.dtype == torch.float64
    assert blank_linear(4, 6, parallel_mode="row", device="meta").weight.is_meta


@ranks(2)
def test_blank_layers_keep_their_marks():
    tp = Mesh(tp=2).group("tp")
    layer = blank_linear(4, 6, parallel_mode="column", group=tp)
    assert {name: specs[0].group for name, _, specs in marks(layer)} == {"weight": tp, "bias": tp}


@ranks(2)
def test_own_layers_share_one_message_and_layers_with_hooks_do_not():
    tp = Mesh(tp=2).group("tp")
    layers = [parallel_linear(4, 6, parallel_mode="column", group=tp) for _ in range(3)]
    seen, results = [], []
    for messages in (1, 3):
        x_TI = torch.ones(2, 4, requires_grad=True)
        ys_To = apply_each(x_TI, *layers)
        with CommDebugMode() as traffic:
            torch.cat(ys_To, dim=-1).square().sum().backward()
        assert traffic.get_total_counts() == messages
        results.append([*ys_To, x_TI.grad])
        layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_close(*results)
    assert seen == [(2, 3)]


def test_layers_of_other_libraries_are_called_one_by_one():
    layers, x_TI = [nn.Linear(4, 6), nn.Linear(4, 2)], torch.randn(3, 4)
    assert_close(apply_each(x_TI, *layers), tuple(layer(x_TI) for layer in layers))
