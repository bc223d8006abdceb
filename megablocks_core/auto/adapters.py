"""Models with adapters as folders that others open: merged into the weights, or beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from megablocks_core.export import save_hf
from megablocks_core.export.arguments import check_model
from megablocks_core.groups import LOCAL, Group, together
from megablocks_core.parallel import merge_lora, save_lora, unmerge_lora
from megablocks_core.parallel.lora.sites import adapted_sites


def save_adapted_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    adapters: str | os.PathLike[str] | None = None,
    group: Group = LOCAL,
    dtype: torch.dtype | Literal["like"] | None = None,
    like: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5 * 2**30,
    vocab_size: int | None = None,
) -> None:
    """Write a model with adapters, from any layout, as folders that transformers and peft open.

    By default the weights in ``path`` have the adapters in them, each rounded once. With a folder
    for ``adapters`` the weights are those without, and the adapters stand there in peft's format:
    under the model's own names, which for most families are those of transformers. ``model`` is
    afterwards what it was, to the bit. Each folder appears whole or not at all, adapters first.

    Args:
        model: A model with adapters (``add_lora``, ``load_lora``), all of them merged or none.
        path: The folder of the weights: new, or empty.
        adapters: The folder of the adapters: new, or empty; ``None`` merges them.
        group: All ranks that hold a part of the model.
        dtype: As ``save_hf`` has it. Adapters keep theirs.
        like: As ``save_hf`` has it.
        max_file_bytes: As ``save_hf`` has it.
        vocab_size: As ``save_hf`` has it.

    Raises:
        ValueError: The model has no adapters, some are merged and some are not, an adapter cannot
            be merged (``merge_lora``), or what ``save_hf`` and ``save_lora`` say.
        RuntimeError: Another rank failed.
    """
    target = None if adapters is None else Path(adapters)
    turn, back = (merge_lora, unmerge_lora) if target is None else (unmerge_lora, merge_lora)
    turned = False
    try:
        with together(f"save_adapted_hf({str(path)!r})", group=group):
            check_model(model)
            merged = _are_merged(model)
            if target is not None and target.absolute() == Path(path).absolute():
                raise ValueError(f"adapters={str(target)!r} must be another folder than path")
            if merged == (target is not None):
                turn(model)
                turned = True
        if target is not None:
            save_lora(model, target, group=group)
        with _factors_aside(model):
            save_hf(
                model,
                path,
                group=group,
                dtype=dtype,
                like=like,
                max_file_bytes=max_file_bytes,
                vocab_size=vocab_size,
            )
    finally:
        if turned:
            back(model)


def _are_merged(model: nn.Module) -> bool:
    found = {site.name: site.adapter for site in adapted_sites(model)}
    merged = [name for name, adapter in found.items() if adapter is not None and adapter.merged]
    if not found:
        raise ValueError("model must have adapters, which add_lora puts there; save_hf writes it")
    if merged and len(merged) < len(found):
        raise ValueError(f"adapters must all be merged or none, not {merged} alone")
    return bool(merged)


@contextmanager
def _factors_aside(model: nn.Module) -> Iterator[None]:
    """Inside, the adapters' factors are no parameters of ``model``."""
    factors = {id(factor) for site in adapted_sites(model) for _, factor in site.factors()}
    before = [(part, dict(part._modules)) for part in model.modules()]
    try:
        for part, children in before:
            for name, child in children.items():
                if id(child) in factors:
                    del part._modules[name]
        yield
    finally:
        for part, children in before:
            part._modules.clear()
            part._modules.update(children)
