"""Groups of ranks, the collectives between them, and marks that say who holds what.

The one package that all others share. Its arithmetic loads no torch; names are loaded on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megablocks_core.groups.collect import Collection as Collection
    from megablocks_core.groups.collect import Held as Held
    from megablocks_core.groups.collect import Whole as Whole
    from megablocks_core.groups.collect import as_bytes as as_bytes
    from megablocks_core.groups.collectives import all_gather_to as all_gather_to
    from megablocks_core.groups.collectives import all_to_all as all_to_all
    from megablocks_core.groups.collectives import copy_slices_to as copy_slices_to
    from megablocks_core.groups.collectives import copy_to as copy_to
    from megablocks_core.groups.collectives import gather_from as gather_from
    from megablocks_core.groups.collectives import reduce_from as reduce_from
    from megablocks_core.groups.collectives import reduce_scatter_to as reduce_scatter_to
    from megablocks_core.groups.collectives import scatter_to as scatter_to
    from megablocks_core.groups.cuts import Segment as Segment
    from megablocks_core.groups.cuts import ShardSpec as ShardSpec
    from megablocks_core.groups.cuts import Specs as Specs
    from megablocks_core.groups.cuts import chunk_slice as chunk_slice
    from megablocks_core.groups.cuts import own_slices as own_slices
    from megablocks_core.groups.cuts import split_evenly as split_evenly
    from megablocks_core.groups.cuts import whole_shape as whole_shape
    from megablocks_core.groups.gradient_shards import GradientShard as GradientShard
    from megablocks_core.groups.gradient_shards import gradient_shard as gradient_shard
    from megablocks_core.groups.gradient_shards import set_gradient_shard as set_gradient_shard
    from megablocks_core.groups.group import LOCAL as LOCAL
    from megablocks_core.groups.group import Group as Group
    from megablocks_core.groups.group import bind as bind
    from megablocks_core.groups.group import check_group as check_group
    from megablocks_core.groups.marking import mark as mark
    from megablocks_core.groups.marking import marks as marks
    from megablocks_core.groups.marking import specs_of as specs_of
    from megablocks_core.groups.mesh import Mesh as Mesh
    from megablocks_core.groups.outcome import interrupts_held as interrupts_held
    from megablocks_core.groups.outcome import together as together
    from megablocks_core.groups.whole import gather_whole as gather_whole
    from megablocks_core.groups.whole import load_slices as load_slices
    from megablocks_core.groups.whole import load_whole as load_whole
    from megablocks_core.groups.whole import logical_shape as logical_shape
    from megablocks_core.groups.whole import logical_tensors as logical_tensors
    from megablocks_core.groups.whole import to_dtensor as to_dtensor
    from megablocks_core.groups.whole import whole_tensor as whole_tensor

_HOMES = {
    "collect": ("Collection", "Held", "Whole", "as_bytes"),
    "collectives": (
        "all_gather_to",
        "all_to_all",
        "copy_slices_to",
        "copy_to",
        "gather_from",
        "reduce_from",
        "reduce_scatter_to",
        "scatter_to",
    ),
    "cuts": (
        "Segment",
        "ShardSpec",
        "Specs",
        "chunk_slice",
        "own_slices",
        "split_evenly",
        "whole_shape",
    ),
    "gradient_shards": ("GradientShard", "gradient_shard", "set_gradient_shard"),
    "group": ("LOCAL", "Group", "bind", "check_group"),
    "marking": ("mark", "marks", "specs_of"),
    "mesh": ("Mesh",),
    "outcome": ("interrupts_held", "together"),
    "whole": (
        "gather_whole",
        "load_slices",
        "load_whole",
        "logical_shape",
        "logical_tensors",
        "to_dtensor",
        "whole_tensor",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
