"""Over ranks a recomputed call may hold slices, and sends again only what it must."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import Mesh, chunk_slice
from megablocks_core.parallel.memory.recompute import recompute
from megablocks_core.testing import ranks
from tests.parallel.recompute_blocks import (
    assert_same_bits,
    block_of,
    ramp,
    results_of,
    saved_bytes,
)
from tests.traffic import Traffic


@ranks(2, 4)
def test_f_104_arguments_are_gathered_over_the_ranks_that_cut_them():
    """Two tensor-parallel replicas with different data: each has the gradients of its own."""
    size = dist.get_world_size()
    mesh = Mesh(tp=2, dp=size // 2)
    tp, replica = mesh.group("tp"), mesh.group("dp").rank
    block = block_of(tp)
    x = ramp(3, 5, 8) * (1 + replica)
    plain = results_of(block, block, x)
    for call in (
        lambda x: recompute(block, x, cut_over=tp),
        lambda x: recompute(block.inner, x, into=block.down, cut_over=tp),
        lambda x: recompute(partial(recompute, block, cut_over=tp), x, cut_over=tp),
    ):
        assert_same_bits(results_of(block, call, x), plain)


@ranks(2, 4)
def test_a_cut_argument_leaves_a_slice_and_costs_one_gather():
    """Uneven slices too; integers, parameters and other layouts stay whole."""
    group = Mesh(tp=dist.get_world_size()).group("tp")
    weight = nn.Parameter(ramp(8))
    for x in (ramp(3, 7), ramp(1), ramp(8, 3).t()):
        reference, own = (x.detach().requires_grad_() for _ in range(2))
        index, argument = torch.arange(x.shape[-1]), own * 1

        def function(x, index, weight):
            return x[..., index].sin() * weight[0]

        call = partial(recompute, function, cut_over=group)
        saved, y = saved_bytes(lambda c=call, x=argument, i=index: c(x, i, weight), weight)
        cut = own.is_contiguous()
        part = chunk_slice(x.numel(), group.size, group.rank)
        held = part.stop - part.start if cut else x.numel()
        assert saved == held * 8 + index.nbytes
        with Traffic() as sent:
            y.sum().backward()
        assert sent.counts().get("all_gather", 0) == cut
        function(reference * 1, index, weight).sum().backward()
        assert torch.equal(own.grad, reference.grad)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_are_sent_again_up_to_the_last_saved_tensor(sequence_parallel):
    """Two blocks: the message that ends the second feeds nothing that backward reads."""
    group = Mesh(tp=2).group("tp")
    block = block_of(group, sequence_parallel=sequence_parallel)
    sent = []
    for call in (lambda x: block(block(x)), lambda x: recompute(lambda x: block(block(x)), x)):
        x = ramp(4, 8).requires_grad_()
        with Traffic() as forward:
            y = call(x)
        with Traffic() as backward:
            y.sum().backward()
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        counts = [traffic.counts() for traffic in (forward, backward)]
        sent.append([[count.get(kind, 0) for kind in kinds] for count in counts])
    (forward, backward), recomputed = sent
    again = [0, 2, 1] if sequence_parallel else [1, 0, 0]
    assert recomputed == [forward, [a + b for a, b in zip(backward, again, strict=True)]]
