"""How many rows go from each rank to each expert, which every rank must know before it sends.

Dimensions: c pieces, q ranks of an expert's features, p ranks of experts, e experts here, E in
all, C places an expert.
"""

import torch
from torch import Tensor

from megablocks_core.groups import Group
from megablocks_core.groups.messages import all_gather, start_all_to_all, wait
from megablocks_core.layers.moe.dispatch.host_read import HostRead
from megablocks_core.parallel.checks import require


class Counts:
    """Counts of this rank's rows and of those that come here, on the device and on the host.

    Sends 8 (c e + 1) bytes to each other rank of ``ep``, and 8 p (c e + 1) to each of ``etp``.

    Args:
        sent_cE: Rows of this rank for each expert [c E], int64.
        capacity: C, for which the splits are known and nothing is read; or ``None``.
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each.

    Attributes:
        received: Rows that come to each expert here [c q p e].

    Raises:
        ValueError: Ranks have other capacities, or some none.
    """

    def __init__(self, sent_cE: Tensor, *, capacity: int | None, ep: Group, etp: Group) -> None:
        pieces, experts = sent_cE.shape[0], sent_cE.shape[1] // ep.size
        by_rank = sent_cE.view(pieces, ep.size, experts).transpose(0, 1).reshape(ep.size, -1)
        own_capacity = by_rank.new_full((ep.size, 1), -1 if capacity is None else capacity)
        wire = torch.cat([by_rank, own_capacity], 1)
        if ep.size > 1:
            ones = [1] * ep.size
            wire = wait(start_all_to_all(wire, receive=ones, send=ones, group=ep))
        wire = wire.unsqueeze(0)
        if etp.size > 1:
            wire = all_gather(wire, dim=0, group=etp, sizes=[1] * etp.size)
        received = wire[..., :-1].reshape(etp.size, ep.size, pieces, experts)
        self.received = received.permute(2, 0, 1, 3).contiguous()
        capacities = wire[..., -1].reshape(-1)
        self._num_sent = sent_cE.numel()
        self._read = None
        if capacity is None:
            values = [sent_cE.reshape(-1), self.received.reshape(-1), capacities]
            self._read = HostRead(torch.cat(values))
        else:
            check_equal(capacities, "capacity")

    def on_host(self) -> tuple[list[int], list[int]]:
        """``sent_cE`` and ``received`` as integers, one after another; the one host read."""
        assert self._read is not None
        values = self._read.values()
        end = self._num_sent + self.received.numel()
        if not torch.compiler.is_compiling() and any(value != -1 for value in values[end:]):
            raise ValueError("capacity must be None on all ranks, or on none")
        return values[: self._num_sent], values[self._num_sent : end]


def check_equal(values: Tensor, name: str) -> None:
    """Raise on every rank unless all ranks gave one value; on a GPU the device stops."""
    message = f"{name} must be equal on all ranks"

    def found() -> str:
        given = (str(value) if value >= 0 else "None" for value in values.tolist())
        return f"{message}, which have {', '.join(given)}"

    require((values == values[:1]).all(), message, found)
