"""All-gathers of CPU tensors, any number of them in flight at a time.

torch's functional all-gather hands gloo a list of one tensor, and gloo's all-gather of lists
corrupts memory while another one is in flight (seen with torch 2.13): a rank crashes, or none
ever answers. Gloo's all-gather of a single tensor does not.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed import ProcessGroup

from megablocks_core.groups.group import Group


def start(x: Tensor, *, group: Group) -> Tensor:
    """Start to gather every rank's ``x`` along dim 0; ``wait_tensor`` waits for the result."""
    if torch.compiler.is_compiling():
        return _start_opaque(x, group.size, group.name)
    return _start(x, group.pg)


def _start(x: Tensor, pg: ProcessGroup | None) -> Tensor:
    assert pg is not None  # alone nothing is sent
    if "cpu:gloo" not in dist.get_backend_config(pg):
        ops = torch.ops._c10d_functional
        return ops.all_gather_into_tensor(x, pg.size(), pg.group_name)
    whole = x.new_empty(pg.size() * x.shape[0], *x.shape[1:])
    wire = [torch.view_as_real(y) if y.is_complex() else y for y in (whole, x)]
    _register_work(whole, pg._allgather_base(*wire))
    return whole


# An operation of its own for the compiler, which may put memory that it has read to another use
# while a message is in flight: what is sent is a copy.
@torch.library.custom_op("megablocks_core::all_gather_of_cpu", mutates_args=())
def _start_opaque(x: Tensor, size: int, group_name: str) -> Tensor:
    return _start(x.clone(), Group.named(group_name).pg)


@_start_opaque.register_fake
def _(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])
