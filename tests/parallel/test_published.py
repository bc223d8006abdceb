"""What is published of a shard is placed as its parameter is."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megablocks_core.parallel.published import Published, cut_alike
from megablocks_core.testing import ranks


@ranks(2)
def test_memory_is_seen_through_the_placements_of_the_parameter():
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        parameter = distribute_tensor(torch.arange(3.0), mesh, [placement])
        memory = torch.zeros_like(parameter.to_local())
        seen = cut_alike(memory, parameter)
        assert isinstance(seen, DTensor)
        assert seen.shape == (3,) and seen.placements == (placement,)
        memory.fill_(5.0)
        assert torch.equal(seen.full_tensor(), torch.full((3,), 5.0))
        number = torch.zeros(())
        assert cut_alike(number, parameter) is number


def test_a_plain_parameter_takes_memory_as_it_is():
    memory = torch.zeros(2)
    assert cut_alike(memory, torch.ones(2)) is memory
    state = Published([(memory, "average", memory, None)], {"updates": 1})
    assert state.fields[0][1] == "average" and state.values == {"updates": 1}
    assert state.groups is None
