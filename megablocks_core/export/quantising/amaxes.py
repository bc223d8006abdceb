"""Largest magnitudes of tensors that lie on many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from megablocks_core.export.lazies import Lazy, shape_of
from megablocks_core.export.ours import NamedBox, Ours, Visited
from megablocks_core.export.slabs import dtype_of, slabs
from megablocks_core.groups import Group
from megablocks_core.numbers.scaling import amax_of

Slab = tuple[str, tuple[slice, ...]]


def amaxes(
    tensors: Mapping[str, Lazy], ours: Ours, collection: Visited, *, group: Group
) -> dict[str, float]:
    """The largest magnitude of each tensor, in float32; every rank calls it and gets all.

    The ranks look at slabs in turn, so that each of these is sent to one rank at most. Sends what
    ``collection.visit`` does, and one small message.

    Args:
        tensors: By name, made of ``ours``.
        ours: The model's logical tensors.
        collection: What the ranks hold of them.
        group: All ranks.
    """
    found = dict.fromkeys(tensors, 0.0)

    def wanted(rank: int) -> Iterator[tuple[Slab, list[NamedBox]]]:
        number = 0
        for name, tensor in tensors.items():
            for box in slabs(shape_of(tensor), dtype_of(tensor)):
                if number % group.size == rank:
                    yield (name, box), ours.needs(tensor, box)
                number += 1

    def seen(slab: Slab, values: list[Tensor]) -> None:
        name, box = slab
        largest = amax_of(ours.values(tensors[name], box, values)).item()
        found[name] = max(found[name], largest)

    collection.visit({rank: wanted(rank) for rank in range(group.size)}, seen)
    everyone = group.all_gather_object(found)
    return {name: max(one[name] for one in everyone) for name in tensors}
