"""Which gradients travel together: parameters cut into buckets. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megablocks_core.parallel.checks import check_whole


class Described(NamedTuple):
    """A parameter as far as its bucket depends on it."""

    index: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    expert: bool


class Slot(NamedTuple):
    """Where a bucket holds parameter ``index``: elements ``start`` to ``stop``."""

    index: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """A flat piece of memory for parameters of one dtype, device and kind.

    Attributes:
        slots: The parameters' places, one after the other from 0.
        length: Elements, a multiple of ``shares``, at least one for each; the last are padding.
        shares: Number of ranks that cut the bucket.
        dtype: Of the parameters.
        device: Of the parameters.
        expert: Whether they are experts.
    """

    slots: tuple[Slot, ...]
    length: int
    shares: int
    dtype: torch.dtype
    device: torch.device
    expert: bool

    def shard(self, rank: int) -> tuple[int, int]:
        """Where the equal part of ``rank`` starts and stops; it may be padding only."""
        part = self.length // self.shares
        return rank * part, (rank + 1) * part


def plan_buckets(
    described: Sequence[Described], *, bucket_bytes: int, shares: int = 1, expert_shares: int = 1
) -> list[Bucket]:
    """Cut parameters into buckets, last first: backward reaches the last parameters first.

    A bucket is closed before it would exceed ``bucket_bytes`` of parameters; a larger
    parameter has one of its own. Buckets come in the order in which they are full.

    Args:
        described: The parameters in the order of registration, each once.
        bucket_bytes: The largest size, counted in the dtype of the parameters.
        shares: Number of ranks that cut buckets of dense parameters.
        expert_shares: The same of experts.

    Raises:
        ValueError: ``bucket_bytes`` is no whole number, or below 1.
    """
    check_bucket_bytes(bucket_bytes)
    filling: dict[tuple[torch.dtype, torch.device, bool], list[Described]] = {}
    closed: list[list[Described]] = []
    for one in reversed(described):
        kind = (one.dtype, one.device, one.expert)
        # Put in again last, so that buckets stand in the order of their latest parameters.
        parts = filling.pop(kind, [])
        limit = bucket_bytes // one.dtype.itemsize
        if parts and sum(part.numel for part in parts) + one.numel > limit:
            closed.append(parts)
            parts = []
        parts.append(one)
        filling[kind] = parts
    return [
        _bucket(parts, expert_shares if parts[0].expert else shares)
        for parts in (*closed, *filling.values())
    ]


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raise ``ValueError`` unless it is a whole number of at least 1."""
    check_whole("bucket_bytes", bucket_bytes, least=1)


def _bucket(parts: list[Described], shares: int) -> Bucket:
    slots, start = [], 0
    for one in parts:
        slots.append(Slot(one.index, start, start + one.numel))
        start += one.numel
    length = max(-(-start // shares), 1) * shares
    return Bucket(tuple(slots), length, shares, parts[0].dtype, parts[0].device, parts[0].expert)
