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
