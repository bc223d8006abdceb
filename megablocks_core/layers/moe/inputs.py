"""What a mixture is called with, checked before one rank sends what another does not.

Dimensions: T tokens of this rank, H features, k slots a token, E experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megablocks_core.layers.moe.routers.scores import check_choices
from megablocks_core.parallel.checks import check_tensors


def check_inputs(
    x: Tensor,
    words: Mapping[str, Tensor | None],
    *,
    hidden_size: int | None,
    num_experts: int | None,
    top_k: int | None,
) -> None:
    """Raise unless these are tokens [... T H] and what belongs to them.

    Args:
        x: Tokens.
        words: "mask", "index" and "choices" of them, of the shape of tokens or in one row; experts
            of a token differ, or are negative.
        hidden_size: H, if it is known.
        num_experts: E, if it is known.
        top_k: k, if it is known.

    Raises:
        ValueError: One of them does not fit.
    """
    given = {name: value for name, value in words.items() if value is not None}
    check_tensors(x=x, **given)
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x of {x.dtype} and shape {list(x.shape)} must be floats [... H]")
    if hidden_size is not None and x.shape[-1] != hidden_size:
        raise ValueError(f"x of shape {list(x.shape)} must be [... {hidden_size}]")
    tokens = x.shape[:-1]
    for name, value in given.items():
        shape = value.shape[:-1] if name == "choices" and value.dim() else value.shape
        if shape not in (tokens, (tokens.numel(),)) or (name == "choices" and value.dim() < 2):
            more = ", k" if name == "choices" else ""
            rule = f"[{', '.join(map(str, tokens))}{more}] or [{tokens.numel()}{more}]"
            raise ValueError(f"{name} of shape {list(value.shape)} must be of {rule}")
        if value.device != x.device:
            raise ValueError(f"{name} on {value.device} must be on {x.device}, as x")
    for name, dtype in (("mask", torch.bool), ("index", torch.int64)):
        if name in given and given[name].dtype != dtype:
            raise ValueError(f"{name} of {given[name].dtype} must be {dtype}")
    if "choices" in given and num_experts is not None:
        width = given["choices"].shape[-1]
        if top_k not in (None, width):
            raise ValueError(f"choices of {width} experts a token must have top_k={top_k}")
        check_choices(given["choices"], num_experts)
