"""From logits to scores, and the choice among them: the same on every rank and in every run.

Dimensions: T tokens, E experts, k choices.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]

# Below this many choices a round each is faster than sorting all.
_FEW = 8


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def precise(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def balance_scores(scores_TE: Tensor, score: Score) -> Tensor:
    """What a balance loss averages: scores that add up to 1 for each token."""
    if score == "softmax":
        return scores_TE
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True).clamp(min=_tiny(scores_TE))


def highest(values_TE: Tensor, k: int) -> Tensor:
    """Places of the ``k`` highest values of each row [T k], highest first; ties to the lowest.

    (``torch.topk`` leaves open which of several equal values it takes.)
    """
    values_TE = values_TE.detach()
    if k > _FEW:
        return values_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    lowest = torch.finfo(values_TE.dtype).min
    left = values_TE.clamp(min=lowest)
    found = []
    for _ in range(k):
        found.append(left.argmax(dim=-1, keepdim=True))
        left = left.scatter(-1, found[-1], float("-inf"))
    return torch.cat(found, dim=-1)


def renormalised(weights_Tk: Tensor, p: float) -> Tensor:
    """Weights over the p-norm of each token's."""
    norm = torch.linalg.vector_norm(weights_Tk, ord=p, dim=-1, keepdim=True)
    return weights_Tk / norm.clamp(min=_tiny(weights_Tk))


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
