"""The compiler's operations give what they say, and the scan keeps no result for backward."""

import pytest
import torch

from megablocks_core.layers.ssm.functions.ssd.chunks import Inputs
from megablocks_core.layers.ssm.functions.ssd.operation import chunked_scan
from tests.layers.ssm.functions.ssd.cases import draw

OPERATIONS = torch.ops.megablocks_core


@pytest.mark.parametrize("every_chunk", [False, True])
@pytest.mark.parametrize("length", [0, 3, 16, 41])
def test_operations_have_the_shapes_that_the_compiler_is_told(length, every_chunk):
    x, dt, A, B, C, D, _ = (
        leaf if leaf is None else leaf.detach() for leaf in draw(1, length, 4, 2, skip=1)
    )
    inputs = [x, dt, A, B, C, D, None, torch.zeros(length, dtype=torch.int64)]
    torch.library.opcheck(OPERATIONS.ssd_scan, (inputs, None, 4, every_chunk))
    y, final, states = OPERATIONS.ssd_scan(inputs, None, 4, every_chunk)
    dstates = torch.randn_like(states) if every_chunk else None
    arguments = (inputs, states, torch.randn_like(y), torch.randn_like(final), dstates, 4)
    torch.library.opcheck(OPERATIONS.ssd_scan_backward, arguments)


def test_only_states_before_every_chunk_have_a_gradient():
    x, dt, A, B, C, *_ = draw(1, 20, 4, 2)
    inputs = Inputs(x, dt, A, B, C, None, None, None)
    assert not chunked_scan(inputs, None, chunk_size=4).states.requires_grad
    assert chunked_scan(inputs, None, chunk_size=4, every_chunk=True).states.requires_grad


def test_inputs_that_want_no_gradient_get_none():
    x, dt, A, B, C, *_ = draw(1, 20, 4, 2)
    inputs = Inputs(x.detach(), dt, A.detach(), B, C.detach(), None, None, None)
    chunked_scan(inputs, None, chunk_size=4).y.sum().backward()
    assert dt.grad is not None and B.grad is not None
    assert inputs.x.grad is None and inputs.A.grad is None and inputs.C.grad is None
