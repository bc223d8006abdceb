"""All ranks agree on what they are about to make before they make it.

Process groups are made by every rank in the same order. Ranks that ask in different orders
hang inside torch.distributed, or end up in each other's groups without a word. So each call
is first one round through the world's store:

* the first rank to come writes its request, the others compare theirs with it;
* the last rank to find them equal settles the round; a rank that finds a difference, or has
  waited too long, settles it as failed. The first settlement counts, so all ranks end alike;
* a rank that comes later finds the round settled and raises at once.

Call n of each rank belongs to round n, however the rounds before ended, so ranks that go on
after a failure are still in step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_AGREED = "agreed"


def agree(request: str, *, timeout: timedelta) -> None:
    """Return once every rank of the world has called this with an equal ``request``.

    Each rank sends about eight small messages to the store, and none to other ranks.

    Raises:
        RuntimeError: The requests differ, or a rank did not ask within ``timeout``. Every rank
            raises, with a text that names the requests and who made them.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    agree_through(
        _get_default_store(),
        request,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout=timeout,
    )


def agree_through(
    store: Store, request: str, *, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Do what ``agree`` says over any store, for any rank of any world."""
    this_round = _Round(store, rank=rank, world_size=world_size)
    this_round.propose(request, timeout)
    verdict = this_round.verdict(request, timeout)
    this_round.leave()
    if verdict != _AGREED:
        late = "" if request in verdict else f"; now rank {rank} asks for {request}"
        raise RuntimeError(verdict + late)


class _Round:
    """One round, as one rank sees it."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank = rank
        self.world_size = world_size
        self.store = PrefixStore("megablocks_core.groups", store)
        self.number = self.store.add(f"calls of rank {rank}", 1)
        self.keys = PrefixStore(f"round {self.number}", self.store)

    def propose(self, request: str, timeout: timedelta) -> None:
        """Write the round's request if this rank is the first, else compare with it."""
        if self.keys.add("opened", 1) == 1:
            self.keys.set("request", f"{self.rank} {request}")
        if not _arrives(self.keys, "request", timeout):
            return
        first_rank, first_request = self.keys.get("request").decode().split(" ", 1)
        if request != first_request:
            self.settle(
                f"ranks must ask for the same groups in the same order; rank {first_rank} asks "
                f"for {first_request}, rank {self.rank} asks for {request}"
            )
        elif self.keys.add("equal", 1) == self.world_size:
            self.settle(_AGREED)

    def verdict(self, request: str, timeout: timedelta) -> str:
        """Wait until the round is settled, or settle it as one that took too long."""
        if not _arrives(self.keys, "verdict", timeout):
            self.settle(
                f"every rank must ask for groups within {timeout.total_seconds():g} s; "
                f"rank {self.rank} asks for {request}, ranks {self.absent()} for none"
            )
            self.keys.wait(["verdict"], timeout)
        return self.keys.get("verdict").decode()

    def settle(self, verdict: str) -> None:
        """End the round with ``verdict``, unless another rank has ended it."""
        if self.keys.add("settled", 1) == 1:
            self.keys.set("verdict", verdict)

    def absent(self) -> list[int]:
        """Ranks that have not come to this round."""
        calls = [self.store.add(f"calls of rank {rank}", 0) for rank in range(self.world_size)]
        return [rank for rank, number in enumerate(calls) if number < self.number]

    def leave(self) -> None:
        """Remove the round from the store, if this is the last of all ranks to have come."""
        if self.keys.add("left", 1) == self.world_size:
            for key in ("opened", "request", "equal", "settled", "verdict", "left"):
                self.keys.delete_key(key)


def _arrives(store: Store, key: str, timeout: timedelta) -> bool:
    """Wait for ``key``. A store that is gone says no as well; its next use raises."""
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return False
    return True
