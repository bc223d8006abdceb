"""Merge adapters into the weights beside them, and undo it to the bit."""

import torch
from torch import Tensor, nn

from megablocks_core.parallel.lora.layers import kind_of
from megablocks_core.parallel.lora.sites import adapted_sites
from megablocks_core.parallel.tensor.adapters import Adapter


@torch.no_grad()
def merge_lora(module: nn.Module) -> None:
    """Add ``scale * B A`` to each adapted weight, in place; the adapters then rest.

    A rank merges its own shares and sends nothing. The sum is taken in at least float32 and
    rounded once. The weights as they were are kept, a copy of each, for ``unmerge_lora``;
    ``remove_lora`` lets them go. A ``state_dict`` does not tell merged weights from others: save
    one before merging, or after ``remove_lora``.

    Raises:
        ValueError: An adapted weight is tied to another layer's, which would change too, or is
            sharded by ``fully_shard``. Nothing was changed.
    """
    found = [
        (site, site.weight, site.adapter)
        for site in adapted_sites(module)
        if site.adapter is not None and not site.adapter.merged
    ]
    for site, weight, _ in found:
        twin = _twin(module, site.owner, weight)
        if twin is not None:
            raise ValueError(f"{site.name}.weight must not be merged: it is tied to that of {twin}")
        if hasattr(weight, "full_tensor"):
            raise ValueError(f"{site.name}.weight must not be merged: fully_shard has cut it")
    for _, weight, adapter in found:
        adapter.base = weight.detach().clone()
        weight.copy_(_merged(adapter.base, adapter))


@torch.no_grad()
def unmerge_lora(module: nn.Module) -> None:
    """Undo ``merge_lora``: the weights have the bits again that they had before.

    Raises:
        ValueError: A weight or an adapter has changed since; nothing was.
    """
    found = [
        (site.name, site.weight, site.adapter, site.adapter.base)
        for site in adapted_sites(module)
        if site.adapter is not None and site.adapter.base is not None
    ]
    for name, weight, adapter, base in found:
        if not torch.equal(weight, _merged(base, adapter)):
            raise ValueError(f"{name} has changed since merge_lora and cannot be unmerged")
    for _, weight, adapter, base in found:
        weight.copy_(base)
        adapter.base = None


def _twin(module: nn.Module, owner: nn.Module, weight: nn.Parameter) -> str | None:
    """The name of another module that holds the same weight."""
    for name, part in module.named_modules():
        if part is not owner and any(x is weight for x in part._parameters.values()):
            return name or kind_of(module)
    return None


def _merged(base: Tensor, adapter: Adapter) -> Tensor:
    added = adapter.added_weight()
    return (base.to(torch.promote_types(base.dtype, added.dtype)) + added).to(base.dtype)
