"""From losses of single layers to one scalar beside a model's loss."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def total_loss(
    losses: Mapping[str, Iterable[tuple[Tensor, Tensor | int]]],
    coefficients: Mapping[str, float],
    *,
    num_tokens: Tensor | int | None = None,
) -> Tensor:
    """Sum over names and layers of ``coefficient * sum / count``.

    Each layer counts as much as any other, so a pipeline's stages add up to the whole model.
    Nothing is sent, and nothing kept: a loss without a coefficient, or with 0, is left out with
    its graph. Without any term the total is 0 and has no graph.

    Args:
        losses: Name to (sum, count) of each layer, as a ``Decoder`` gives; a stage without such
            layers has an empty list.
        coefficients: Of names of ``losses``.
        num_tokens: Divides in place of each layer's count, such as the tokens of all
            micro-batches and ranks: then totals of micro-batches, and gradients of ranks, add up.

    Raises:
        ValueError: A coefficient is of a name that is not there.
    """
    unknown = sorted(set(coefficients) - set(losses))
    if unknown:
        raise ValueError(f"coefficients of {unknown} must be of losses that are there: {[*losses]}")
    terms = [
        coefficient * (total / _at_least_one(count if num_tokens is None else num_tokens))
        for name, coefficient in coefficients.items()
        if coefficient != 0
        for total, count in losses[name]
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
