"""Orthogonalise the matrices of many parameters, whole or cut over ranks.

Three ways to serve a cut matrix, with equal results:

* "duplicated": every rank gathers the whole and works on it;
* "gather": one rank gets the whole, works on it and sends the slices back; owners share the work;
* "distributed": no rank sees the whole; Gram matrices are all-reduced in each step. It serves
  matrices that are cut along one dimension, the longer one; others are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.parallel.muon.matrices import MatrixLayout, part_of, put_part
from megablocks_core.parallel.muon.matrix_exchange import (
    Cut,
    divide_from_owners,
    join_on_all,
    join_on_owners,
)
from megablocks_core.parallel.muon.newton_schulz import (
    Columns,
    NewtonSchulz,
    orthogonalize,
    orthogonalize_columns,
)
from megablocks_core.parallel.muon.owners import owners_of

MODES = ("gather", "duplicated", "distributed")

# Elements of whole matrices that are brought together at a time.
_BATCH = 1 << 26

Scale = Callable[[int, int], float]


class Unit(NamedTuple):
    """This rank's share of a two-dimensional tensor, and how its matrices lie in it."""

    share: Tensor
    layout: MatrixLayout


def orthogonal_updates(units: Sequence[Unit], method: NewtonSchulz, *, mode: str) -> list[Tensor]:
    """Each unit with its matrices orthogonalised: this rank's share of it.

    Every rank of the groups that cut units calls it, with the same units in the same order.

    Args:
        units: In the dtype of the products.
        method: How.
        mode: One of ``MODES``.
    """
    found: dict[int, Tensor] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, (share, layout) in enumerate(units):
        groups = tuple(spec.group for spec in layout.cuts)
        by_columns = mode == "distributed" and layout.split_dim is not None
        alike.setdefault((groups, by_columns, share.dtype, share.device), []).append(index)
    for (groups, by_columns, *_), indices in alike.items():
        chosen = [units[index] for index in indices]
        if not groups:
            done = _whole_results([unit.share for unit in chosen], chosen, method)
        elif by_columns:
            done = _by_columns(chosen, method)
        elif mode == "duplicated":
            done = [x for batch in _batches(chosen) for x in _on_all(batch, method)]
        else:
            done = _on_owners(chosen, method)
        found.update(zip(indices, done, strict=True))
    return [found[index] for index in range(len(units))]


def scaled(share: Tensor, layout: MatrixLayout, scale: Scale) -> Tensor:
    """A unit's share with each matrix multiplied by ``scale(rows, columns)`` of its whole."""
    if len(layout.boxes) == 1:
        return share * scale(*layout.shape)
    result = torch.empty_like(share)
    for rows, columns in layout.boxes:
        at = layout.places(0, rows), layout.places(1, columns)
        factor = scale(rows[1] - rows[0], columns[1] - columns[0])
        put_part(result, *at, part_of(share, *at) * factor)
    return result


def _whole_results(
    wholes: Sequence[Tensor], units: Sequence[Unit], method: NewtonSchulz
) -> list[Tensor]:
    parts = [
        whole[rows[0] : rows[1], columns[0] : columns[1]]
        for whole, unit in zip(wholes, units, strict=True)
        for rows, columns in unit.layout.boxes
    ]
    done = iter(orthogonalize(parts, method))
    results = [torch.empty_like(whole) for whole in wholes]
    for result, unit in zip(results, units, strict=True):
        for (top, bottom), (left, right) in unit.layout.boxes:
            result[top:bottom, left:right] = next(done)
    return results


def _on_all(units: Sequence[Unit], method: NewtonSchulz) -> list[Tensor]:
    chains = [_chain(unit.layout) for unit in units]
    wholes = [unit.share for unit in units]
    for level in reversed(range(len(chains[0]))):
        cuts = [chain[level] for chain in chains]
        wholes = join_on_all(wholes, cuts, group=cuts[0].spec.group)
    results = _whole_results(wholes, units, method)
    for level in range(len(chains[0])):
        cuts = [chain[level] for chain in chains]
        results = [
            cut.share_of(x, cut.spec.group.rank) for cut, x in zip(cuts, results, strict=True)
        ]
    return results


def _on_owners(units: Sequence[Unit], method: NewtonSchulz) -> list[Tensor]:
    sizes = [spec.group.size for spec in units[0].layout.cuts]
    owners = owners_of([unit.layout.cost for unit in units], math.prod(sizes))
    done, start = [], 0
    for batch in _batches(units):
        mine = owners[start : start + len(batch)]
        start += len(batch)
        shares = dict(enumerate(unit.share for unit in batch))
        done += _exchanged(batch, shares, [_place(o, sizes) for o in mine], method)
    return done


def _exchanged(
    units: Sequence[Unit],
    shares: dict[int, Tensor],
    owners: Sequence[tuple[int, ...]],
    method: NewtonSchulz,
) -> list[Tensor]:
    """Innermost first, each group brings what it holds to the ranks at the owners' places."""
    chains = [_chain(unit.layout) for unit in units]
    held, like = [shares], next(iter(shares.values()))
    for level in reversed(range(len(chains[0]))):
        shares, group = held[-1], chains[0][level].spec.group
        at = {index: owners[index][level] for index in shares}
        mine = [index for index in shares if at[index] == group.rank]
        wholes: list[Tensor] = []
        if shares:
            cuts = [chains[index][level] for index in shares]
            wholes = join_on_owners(list(shares.values()), cuts, list(at.values()), group=group)
        held.append(dict(zip(mine, wholes, strict=True)))
    owned = list(held[-1])
    wholes = list(held.pop().values())
    results = _whole_results(wholes, [units[index] for index in owned], method)
    for level in range(len(chains[0])):
        indices, group = list(held.pop()), chains[0][level].spec.group
        if indices:
            cuts = [chains[index][level] for index in indices]
            at = [owners[index][level] for index in indices]
            results = divide_from_owners(results, cuts, at, like=like, group=group)
    return results


def _by_columns(units: Sequence[Unit], method: NewtonSchulz) -> list[Tensor]:
    parts, places = [], []
    for share, layout in units:
        dim = layout.split_dim
        assert dim is not None
        for box in layout.boxes:
            at = layout.places(0, box[0]), layout.places(1, box[1])
            part = part_of(share, *at)
            counted = layout.counted.get(dim)
            if counted is not None:
                counted = torch.isin(at[dim], counted).nonzero().flatten().to(share.device)
            parts.append(Columns(part if dim == 1 else part.mT, counted))
            places.append((dim, *at))
    done = orthogonalize_columns(parts, method, units[0].layout.groups)
    found = iter(zip(places, done, strict=True))
    results = [torch.empty_like(unit.share) for unit in units]
    for result, (_, layout) in zip(results, units, strict=True):
        for _ in layout.boxes:
            (dim, rows, columns), x = next(found)
            put_part(result, rows, columns, x if dim == 1 else x.mT)
    return results


def _chain(layout: MatrixLayout) -> list[Cut]:
    """The cuts of a unit, outermost first, each with the shape of what it cuts on this rank."""
    chain: list[Cut] = []
    shape: tuple[int, ...] = layout.shape
    for spec in layout.cuts:
        chain.append(Cut(spec, shape))
        shape = chain[-1].shape_on(spec.group.rank)
    return chain


def _batches(units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Consecutive units whose wholes are brought together at a time."""
    batches: list[list[Unit]] = []
    room = 0
    for unit in units:
        size = math.prod(unit.layout.shape)
        if not batches or size > room:
            batches.append([])
            room = _BATCH
        batches[-1].append(unit)
        room -= size
    return list(batches)


def _place(owner: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The owner's rank in each of the groups."""
    place = []
    for size in reversed(sizes):
        owner, rank = divmod(owner, size)
        place.append(rank)
    return tuple(reversed(place))
