"""Other numbers of rows for the tables of a vocabulary, whole or cut over a group.

Dimensions: V rows of the whole table, H features; v is this rank's share of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    all_to_all,
    mark,
    specs_of,
    together,
)
from megablocks_core.groups.placements import is_dtensor
from megablocks_core.parallel.counter import key_of
from megablocks_core.parallel.initial import normal_box
from megablocks_core.parallel.tensor.adapters import adapter_of
from megablocks_core.parallel.tensor.embedding import VocabParallelEmbedding
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear

_EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding)
_HEADS = (nn.Linear, ColumnParallelLinear)


class _Table(NamedTuple):
    """A layer with one row for each entry of the vocabulary."""

    name: str
    layer: Any
    group: Group

    @property
    def length(self) -> int:
        embeds = type(self.layer) in _EMBEDDINGS
        return self.layer.num_embeddings if embeds else self.layer.out_features


def resize_vocab(
    module: nn.Module,
    rows: int,
    *,
    seed: int,
    std: float | None = None,
    tables: Sequence[str] = ("model.embed_tokens", "lm_head"),
) -> None:
    """Give a model a vocabulary of ``rows`` entries: the first ones stay, others go or come.

    A row that comes has the values that a model built with ``rows`` entries from ``seed`` has
    there: a function of the seed, the table's name and the place in it, at any cut. Biases of
    such rows are zero. Tied tables stay tied. ``module.spec`` and ``module.config``, where they
    know a ``vocab_size``, say the new one. Every rank that holds a part of the tables calls it;
    a row that moves is sent once.

    Parameters are new tensors: call it before optimizers, ``fully_shard``, ``DataParallel`` and
    the like learn of them.

    Args:
        module: A ``Decoder``, or a model with such tables.
        rows: V. Over several ranks it need not divide: later ranks may hold fewer rows, or none.
        seed: Of the rows that come.
        std: Their deviation; 0 for zeros. Default ``initializer_range`` of ``module.spec`` or
            ``module.config``.
        tables: The names of the layers: embeddings and linear layers, whole or cut over a
            tensor-parallel group. A name that ``module`` lacks stands for no layer.

    Raises:
        ValueError: ``rows`` is not positive or leaves the row of ``padding_idx`` out, the module
            has none of the tables or one that is not served (a class of another library, one with
            an adapter or cut by ``fully_shard``), they differ in length or group, or ranks call
            for different things. Nothing was changed.
    """
    task = f"resize_vocab(rows={rows})"
    parts = dict(module.named_modules())
    found = [_table(name, parts[name]) for name in tables if name in parts]
    if not found:
        raise ValueError(f"tables={tuple(tables)} must name layers of the {_kind(module)}")
    group = found[0].group
    with together(task, group=group):
        _check(found, rows)
        std = _deviation(module) if std is None else std
        descriptions = _resized_descriptions(module, rows)
    asked = group.all_gather_object((rows, seed, std, [table.name for table in found]))
    if any(one != asked[0] for one in asked):
        raise ValueError(f"rows, seed, std and tables must be alike on all ranks, not {asked}")
    made: dict[int, nn.Parameter] = {}
    for table in found:
        for leaf, old in list(table.layer.named_parameters(recurse=False)):
            if id(old) not in made:
                new = _resized(table, leaf, rows, seed=seed, std=std)
                made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
            setattr(table.layer, leaf, made[id(old)])
    for table in found:
        _say(table, rows)
    for name, description in descriptions.items():
        setattr(module, name, description)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "vocab_size"):
        config.vocab_size = rows


def _table(name: str, layer: Any) -> _Table:
    if type(layer) not in (*_EMBEDDINGS, *_HEADS):
        served = ", ".join(kind.__name__ for kind in (*_EMBEDDINGS, *_HEADS))
        raise ValueError(f"{name} is a {_kind(layer)} and must be one of {served}")
    return _Table(name, layer, getattr(layer, "group", LOCAL))


def _check(tables: list[_Table], rows: int) -> None:
    if type(rows) is not int or rows < 1:
        raise ValueError(f"rows={rows!r} must be a positive whole number")
    first = tables[0]
    for table in tables:
        name, layer = table.name, table.layer
        if (table.length, table.group) != (first.length, first.group):
            raise ValueError(
                f"{name} of {table.length} rows over {table.group} must be as {first.name}, of "
                f"{first.length} rows over {first.group}"
            )
        if adapter_of(layer) is not None:
            raise ValueError(f"{name} must have no adapter: merge it and take it off first")
        padding = getattr(layer, "padding_idx", None)
        if padding is not None and padding >= rows:
            raise ValueError(f"rows={rows} must be above padding_idx={padding} of {name}")
        for leaf, parameter in layer.named_parameters(recurse=False):
            specs = specs_of(layer, leaf)
            packed = any(spec.has_copies or len(spec.segments or ()) > 1 for spec in specs)
            foreign = bool(specs) and not hasattr(layer, "group")
            if foreign or is_dtensor(parameter) or packed or any(spec.dim for spec in specs):
                raise ValueError(f"{name}.{leaf} must be whole, or cut by its rows alone")


def _deviation(module: nn.Module) -> float:
    for name in ("spec", "config"):
        found = getattr(getattr(module, name, None), "initializer_range", None)
        if isinstance(found, int | float):
            return float(found)
    raise ValueError("std=None must be a number: the module has no initializer_range")


def _resized_descriptions(module: nn.Module, rows: int) -> dict[str, Any]:
    """A frozen ``spec`` with the new size, which checks it."""
    spec: Any = getattr(module, "spec", None)
    if is_dataclass(spec) and not isinstance(spec, type) and hasattr(spec, "vocab_size"):
        return {"spec": replace(spec, **{"vocab_size": rows})}
    return {}


@torch.no_grad()
def _resized(table: _Table, leaf: str, rows: int, *, seed: int, std: float) -> Tensor:
    """This rank's share of a parameter with ``rows`` rows."""
    old: Tensor = table.layer.get_parameter(leaf)
    (held,), (own,) = _cut(table.length, table.group), _cut(rows, table.group)
    new = old.new_empty(own.stop - own.start, *old.shape[1:])
    if old.is_meta:
        return new
    group = table.group
    theirs = [_cut(rows, group, rank)[0] for rank in range(group.size)]
    olds = [_cut(table.length, group, rank)[0] for rank in range(group.size)]
    send = [_shared(held, part) for part in theirs]
    receive = [_shared(part, own) for part in olds]
    moved = all_to_all(old[: sum(send)], send=send, receive=receive, group=group)
    new[: len(moved)] = moved
    if leaf == "weight":
        key = key_of(seed, f"{table.name}.{leaf}")
        fresh = (slice(own.start + len(moved), own.stop), slice(0, old.shape[1]))
        normal_box(new[len(moved) :], fresh, (rows, old.shape[1]), key=key, std=std)
    else:
        new[len(moved) :] = 0
    return new


def _cut(length: int, group: Group, rank: int | None = None) -> list[slice]:
    return ShardSpec(0, group, (Segment(length),)).ranges(length, rank)


def _shared(held: slice, wanted: slice) -> int:
    """How many rows are in both."""
    return max(0, min(held.stop, wanted.stop) - max(held.start, wanted.start))


def _say(table: _Table, rows: int) -> None:
    """Let the layer and its marks know the new size."""
    layer = table.layer
    if type(layer) in _EMBEDDINGS:
        layer.num_embeddings = rows
    else:
        layer.out_features = rows
    if isinstance(layer, VocabParallelEmbedding | ColumnParallelLinear):
        layer.spec = ShardSpec(0, table.group, (Segment(rows),))
        for leaf, _ in layer.named_parameters(recurse=False):
            mark(layer, leaf, layer.spec)
    if isinstance(layer, VocabParallelEmbedding):
        (layer.rows,) = layer.spec.ranges(rows)


def _kind(module: object) -> str:
    return type(module).__name__
