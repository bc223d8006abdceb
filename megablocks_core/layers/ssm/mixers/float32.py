"""Parameters that stay float32 whatever a model is converted to: decays and step sizes.

A decay is applied once a token, so an error of its logarithm grows with the length: at 8 bits of
mantissa a state that should keep half of its value over 100 tokens is off by percents.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Float32Parameters(nn.Module):
    """A module of whose own parameters some are float32 at least after any conversion.

    Attributes:
        keep_float32: Their names. ``fully_shard`` reads them too, so that a precision policy leaves
            these parameters alone.
    """

    keep_float32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert, but keep wide what is to be."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        parameters = [self._parameters[name] for name in self.keep_float32]
        kept = {id(x) for p in parameters if p is not None for x in (p, p.grad)}

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in kept or moved.dtype.itemsize >= 4:
                return moved
            source = moved if tensor.is_meta else tensor
            return source.to(moved.device, wide_dtype(tensor.dtype))

        return super()._apply(wide, recurse=False)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load, but widen first what ``assign=True`` would put in a parameter's place."""
        for name in self.keep_float32:
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.is_floating_point():
                state_dict[prefix + name] = given.to(wide_dtype(given.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def wide_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``, or float32 if that is wider; of ``None`` the default's."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
