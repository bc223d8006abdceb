"""The tensors of a Mamba-2 layer on one rank (https://arxiv.org/abs/2405.21060).

A rank has whole heads and whole groups of B and C; each packed part, z, x, B, C and dt, is cut on
its own. Decay rates, skips and biases of steps are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megablocks_core.export.lazies import Lazy
from megablocks_core.export.operations import Decay
from megablocks_core.export.quantising.tensors import converted
from megablocks_core.export.trtllm.model import Model
from megablocks_core.export.trtllm.scales import Piece
from megablocks_core.export.trtllm.slices import cut, joined, part, with_last_dim


def mamba_layer(
    model: Model,
    weights: Mapping[str, Lazy],
    source: str,
    ours: str,
    slice_of: tuple[int, int],
    dtype: torch.dtype,
) -> list[Piece]:
    """The mixer of a layer, without the norm before it.

    Args:
        model: Its sizes.
        weights: Those of a Hugging Face folder.
        source: The layer's name there.
        ours: Its name in the rank's file.
        slice_of: Which slice this rank has, and of how many.
        dtype: Of what is not float32 by its nature.
    """
    index, count = slice_of
    inner, groups = model.ffn, model.kv_heads * model.config["state_size"]
    conv, projected = (inner, groups, groups), (inner, inner, groups, groups, model.heads)
    theirs, ours = f"{source}.mixer", f"{ours}.ssm"
    found: list[Piece] = []
    for name, sizes in (("in_proj", projected), ("conv1d", conv)):
        for kind in ("weight", "bias"):
            whole = weights.get(f"{theirs}.{name}.{kind}")
            if whole is not None:
                own = _packed(whole, sizes, index, count)
                own = with_last_dim(own) if (name, kind) == ("conv1d", "weight") else own
                found.append(Piece(f"{ours}.{name}.{kind}", own, dtype))
    own = cut(weights[f"{theirs}.out_proj.weight"], index, count, 1)
    found.append(Piece(f"{ours}.out_proj.weight", own, dtype))
    if f"{theirs}.out_proj.bias" in weights:
        found.append(Piece(f"{ours}.out_proj.bias", weights[f"{theirs}.out_proj.bias"], dtype))
    own = cut(weights[f"{theirs}.norm.weight"], index, count)
    found.append(Piece(f"{ours}.norm.weight", own, dtype))
    (rates,) = Decay()([converted(weights[f"{theirs}.A_log"], torch.float32)])
    skips, steps = weights[f"{theirs}.D"], weights[f"{theirs}.dt_bias"]
    for name, whole in (("A", rates), ("D", skips), ("dt_bias", steps)):
        found.append(Piece(f"{ours}.{name}", cut(whole, index, count), torch.float32))
    return found


def _packed(whole: Lazy, sizes: tuple[int, ...], index: int, count: int) -> Lazy:
    """One slice of each of the parts that lie side by side."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [part(whole, start, size) for start, size in zip(starts, sizes, strict=True)]
    return joined([cut(one, index, count) for one in parts])
