"""What the arguments of every function have in common."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megablocks_core.parallel.checks import check_floating, check_tensors


def check_arguments(
    optional: Mapping[str, Tensor | None], *, cu_seqlens: Tensor | None = None, **tensors: Tensor
) -> None:
    """Refuse what is no floating-point tensor, or lies elsewhere than the first of ``tensors``.

    Args:
        optional: Further tensors by name, that may be missing.
        cu_seqlens: Sums of documents' lengths, integers that must lie there too.
        **tensors: By name.

    Raises:
        ValueError: As said.
    """
    check_tensors(**tensors)
    device = next(iter(tensors.values())).device
    given = {name: x for name, x in optional.items() if x is not None}
    check_tensors(**given)
    for name, x in {**tensors, **given}.items():
        check_floating(f"{name}.dtype", x.dtype)
    sums = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    check_tensors(**sums)
    for name, x in {**tensors, **given, **sums}.items():
        if x.device != device:
            raise ValueError(f"{name} on {x.device} must be on {device}, as {next(iter(tensors))}")


def check_dims(**wanted: tuple[Tensor, int]) -> None:
    """Refuse tensors of another number of dimensions than that beside them.

    Raises:
        ValueError: As said.
    """
    for name, (x, dims) in wanted.items():
        if x.dim() != dims:
            raise ValueError(f"{name} of shape {tuple(x.shape)} must have {dims} dimensions")


def check_shapes(**wanted: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Refuse tensors of other shapes than those beside them; one that is missing has any.

    Raises:
        ValueError: As said; sizes that would broadcast are refused too.
    """
    for name, (x, shape) in wanted.items():
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} of shape {tuple(x.shape)} must have shape {shape}")


def check_groups_of_heads(groups: int, heads: int) -> None:
    """Refuse groups that heads do not divide into evenly.

    Raises:
        ValueError: As said.
    """
    if groups < 1 or heads % groups:
        raise ValueError(f"B of {groups} groups must divide the {heads} heads of x evenly")
