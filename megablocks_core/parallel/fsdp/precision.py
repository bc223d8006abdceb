"""In which dtype ``fully_shard`` computes with parameters and reduces their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megablocks_core.groups.marking import clean_name, without_ddp
from megablocks_core.groups.patterns import chosen
from megablocks_core.parallel.checks import check_flags, check_floating, check_words


@dataclass(frozen=True)
class PrecisionPolicy:
    """Mixed precision: parameters are kept as they are, gathered and used in fewer bits.

    Buffers are never cast down.

    Attributes:
        params: The dtype in which parameters are gathered and used; ``None``: their own.
        reduce: The dtype in which gradients are summed over ranks and micro-batches.
        keep_float32: Patterns of logical names of parameters and buffers that stay float32 (a
            router); the last steps of a name are enough. Decays and step sizes of state-space
            layers do so by themselves.
        cast_inputs: Floating-point inputs of the whole module are cast to ``params``. What
            passes from unit to unit is left alone.
        outputs: The dtype to which floating-point outputs of the whole module are cast.
    """

    params: torch.dtype | None = torch.bfloat16
    reduce: torch.dtype = torch.float32
    keep_float32: tuple[str, ...] = ()
    cast_inputs: bool = True
    outputs: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: One is of another kind.
        """
        for name in ("params", "reduce", "outputs"):
            dtype = getattr(self, name)
            if dtype is not None or name == "reduce":
                check_floating(name, dtype)
        check_words("keep_float32", self.keep_float32)
        check_flags(cast_inputs=self.cast_inputs)


AS_THEY_ARE = PrecisionPolicy(params=None, cast_inputs=False)


def widen_kept(module: nn.Module, policy: PrecisionPolicy) -> set[int]:
    """Make the parameters and buffers that the policy keeps float32; return the parameters' ids.

    A module may keep its own without being asked: its attribute ``keep_float32`` has their names
    there, such as ("A_log", "dt_bias").

    Raises:
        ValueError: A pattern matches neither.
    """
    kept: set[int] = set()
    tensors = list(_named_tensors(module))
    found = chosen([name for name, *_ in tensors], policy.keep_float32, ends=True)
    if found.unmatched:
        raise ValueError(
            f"keep_float32={policy.keep_float32}: no parameter's or buffer's name matches "
            f"{found.unmatched}"
        )
    for name, owner, key, tensor in tensors:
        asked = name in found.names or key in getattr(owner, "keep_float32", ())
        if not asked or not tensor.is_floating_point():
            continue
        if isinstance(tensor, nn.Parameter):
            kept.add(id(tensor))
            if tensor.dtype.itemsize < 4:
                tensor.data = tensor.data.float()
        elif tensor.dtype.itemsize < 4:
            owner._buffers[key] = tensor.float()
    return kept


def dtypes_of(
    parameter: Tensor, policy: PrecisionPolicy, *, kept: bool
) -> tuple[torch.dtype, torch.dtype]:
    """(the dtype in which a parameter is used, that in which its gradient is reduced)."""
    own = parameter.dtype
    if kept or policy.params is None or not own.is_floating_point:
        # float32 and float64 are reduced as they are.
        return own, own if own.itemsize >= 4 or not own.is_floating_point else policy.reduce
    return policy.params, policy.reduce


def use_in(owner: nn.Module, name: str, dtype: torch.dtype) -> None:
    """During each forward pass of ``owner`` its parameter ``name`` is a cast copy."""

    def cast(*_: Any) -> None:
        parameter = owner._parameters[name]
        assert parameter is not None
        owner.__dict__.setdefault("_uncast", {})[name] = parameter
        owner._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]

    def restore(*_: Any) -> None:
        parameter = owner.__dict__.get("_uncast", {}).pop(name, None)
        if parameter is not None:
            owner._parameters[name] = parameter

    owner.register_forward_pre_hook(cast)
    owner.register_forward_hook(restore, always_call=True)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(logical name, owner, name there, tensor) of all parameters and buffers."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        path = without_ddp(module, prefix)
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                yield clean_name(f"{path}.{key}" if path else key), owner, key, tensor
