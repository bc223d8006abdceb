"""A model as every exporter sees it: its config, and what makes each tensor of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from megablocks_core.export.arguments import check_model, folder_of
from megablocks_core.export.dtypes import check_values, chosen
from megablocks_core.export.hf_files import made_of, planned
from megablocks_core.export.layout import Layout
from megablocks_core.export.lazies import Lazy
from megablocks_core.export.ours import Ours, Visited
from megablocks_core.export.quantised import plain
from megablocks_core.export.slabs import slabs
from megablocks_core.export.verifying import layout_of
from megablocks_core.export.vocabulary import padded, part_shapes, with_vocabulary
from megablocks_core.files import check_new, read_json
from megablocks_core.groups import Collection, Group, Held, Whole, logical_tensors, together


@dataclass(frozen=True)
class Described:
    """A model whose values are known to be finite and to fit the dtypes that are asked for.

    Attributes:
        config: Of Hugging Face's format, without a quantisation; a copy of the caller's own.
        layout: The tensors of a Hugging Face folder, as made of the model's.
        collection: Gives the values of the model's tensors.
        ours: The model's logical tensors.
        wholes: The tensors of a Hugging Face folder in the order of its files, with the dtypes
            that were asked for.
        made: Each of them by on-disk name, in the model's own dtype.
    """

    config: dict[str, Any]
    layout: Layout
    collection: Visited
    ours: Ours
    wholes: list[Whole]
    made: dict[str, Lazy]


def target_of(model: object, path: str | os.PathLike[str], *, group: Group, task: str) -> Path:
    """The folder that a model shall be written to; every rank calls it.

    Raises:
        ValueError: ``model`` is none, or ``path`` is no folder that is new or empty.
    """
    with together(task, group=group):
        check_model(model)
        target = Path(os.path.realpath(folder_of(path)))
        if group.rank == 0:
            check_new(target)
    return target


def described(
    model: nn.Module,
    *,
    group: Group,
    task: str,
    agreed: Mapping[str, object],
    dtype: torch.dtype | Literal["like"] | None = None,
    like: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    allow_nonfinite: bool = False,
) -> Described:
    """Describe a model, at any layout; every rank of ``group`` calls it.

    Every rank looks once at its shares' values. Sends some small messages; a tied tensor that is
    held apart from its twin, as on the last stage of a pipeline, goes with that to the first rank.

    Args:
        model: A model of a family in ``families.FAMILIES``.
        group: All ranks that hold a part of it.
        task: What to call the work in an error.
        agreed: By name the caller's further arguments that must be equal on all ranks.
        dtype: Of all floating-point tensors, or those of the folder ``like``.
        like: A folder whose ``config.json`` is taken; default that of the model.
        vocab_size: How many rows of a padded vocabulary are written.
        allow_nonfinite: Whether NaN and infinite values are written like others.

    Raises:
        ValueError: The family is unknown, tensors are not those that the config describes or are
            on ``meta``, values are not finite or do not fit their dtypes, tied tensors that are
            held apart differ, or ranks differ in what they ask for.
    """
    with together(task, group=group):
        config = config_of(model, None if like is None else folder_of(like, "like"))
        if vocab_size is not None:
            config = with_vocabulary(config, vocab_size)
        held = [
            Held(name, tensor, specs)
            for name, tensor, specs in logical_tensors(model, remove_duplicate=True, unstack=True)
        ]
        if empty := [name for name, tensor, _ in held if tensor.is_meta]:
            raise ValueError(f"model must have values, but {empty} are on meta")
        own = part_shapes(model)
    # Stages of a pipeline hold different tensors, and must see one layout.
    shapes = {name: shape for one in group.all_gather_object(own) for name, shape in one.items()}
    with together(task, group=group):
        layout = layout_of(config).named(shapes)
        if vocab_size is not None:
            layout = padded(layout, config, shapes)
        dtypes = chosen(dtype, like)
    collection = Collection(held, group=group, task=task, raises=RuntimeError, order=layout.order)
    copies = _copies(collection, layout)
    with together(task, group=group):
        once = [whole for whole in collection.wholes if whole.name not in copies]
        wholes = planned(once, layout, dtypes)
    _check_agreed({**agreed, "dtype": [*map(str, wholes)]}, group)
    _check_copies(collection, copies, group)
    check_values(held, layout, dtypes, group=group, allow_nonfinite=allow_nonfinite)
    ours = Ours(collection.wholes)
    return Described(config, layout, collection, ours, wholes, made_of(ours, layout))


def _copies(collection: Collection, layout: Layout) -> dict[str, str]:
    """Tensors that a tie leaves out on disk and a rank holds apart, with their twins."""
    here = {whole.name for whole in collection.wholes}
    return {
        name: twin
        for name, twin in layout.tied_parts.items()
        if name in here and twin in here and name not in layout.order
    }


def _check_copies(collection: Collection, copies: Mapping[str, str], group: Group) -> None:
    """Compare such tensors with their twins, on the first rank.

    Raises:
        ValueError: On every rank: some differ, by name.
    """
    kinds = {name: (shape, dtype) for name, shape, dtype in collection.wholes}
    pairs = {name: twin for name, twin in copies.items() if kinds[name] == kinds[twin]}
    differing = copies.keys() - pairs.keys()
    boxes = [
        (name, [(name, box), (twin, box)])
        for name, twin in pairs.items()
        for box in slabs(*kinds[name])
    ]

    def compare(name: str, values: list[Tensor]) -> None:
        if not torch.equal(*values):
            differing.add(name)

    collection.visit({0: boxes}, compare)
    if names := group.all_gather_object(sorted(differing))[0]:
        texts = [f"{name} and {copies[name]}" for name in names]
        raise ValueError(f"the model has {', '.join(texts)}, which are tied, but differ")


def _check_agreed(plan: Mapping[str, object], group: Group) -> None:
    """Raise where ranks would write different files: they were called with other arguments.

    Raises:
        ValueError: They would.
    """
    digests = {name: xxh3_64_hexdigest(repr(part).encode()) for name, part in plan.items()}
    for rank, theirs in zip(group.ranks, group.all_gather_object(digests), strict=True):
        differing = [name for name, digest in digests.items() if theirs.get(name) != digest]
        if differing:
            raise ValueError(f"ranks must agree on {differing}, but rank {rank} has another")


def config_of(model: nn.Module, like: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The config of a model, or that of the folder ``like``; without a quantisation.

    Raises:
        ValueError: The model has none, and no folder is given.
    """
    if like is not None:
        return plain(read_json(Path(like) / "config.json", dict))
    spec: Any = getattr(model, "spec", None)
    if hasattr(spec, "to_hf"):
        return dict(spec.to_hf())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        return plain(json.loads(config.to_json_string()))
    raise ValueError(f"like={like} must be a folder, for the model has no spec or config to write")
