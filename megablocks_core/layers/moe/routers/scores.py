"""From logits to scores, and the choice among them: the same on every rank and in every run.

Dimensions: T tokens, E experts, k choices.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megablocks_core.parallel.checks import check_whole, is_whole, require

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


def check_score(score: str) -> None:
    """Raise unless it is a name of ``SCORES``."""
    if score not in SCORES:
        raise ValueError(f"score={score!r} must be one of {', '.join(SCORES)}")


def check_top_k(num_experts: int, top_k: int) -> None:
    """Raise unless a token can choose so many experts."""
    check_whole("num_experts", num_experts, least=1)
    if not is_whole(top_k) or not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}")


def check_mask(mask: Tensor | None, rows: Tensor) -> None:
    """Raise unless there are rows [T ...], and a mask has one bool for each."""
    if rows.dim() != 2:
        raise ValueError(f"logits of shape {list(rows.shape)} must be [T E]")
    if mask is None:
        return
    if tuple(mask.shape) != (rows.shape[0],):
        raise ValueError(f"mask of shape {list(mask.shape)} must be of [{rows.shape[0]}]")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask of {mask.dtype} must be bool: True for a token that counts")


def check_choices(choices_Tk: Tensor, num_experts: int) -> None:
    """Raise unless they are experts, or negative, and a token has each expert at most once."""
    if choices_Tk.dtype != torch.int64:
        raise ValueError(f"choices of {choices_Tk.dtype} must be int64")
    ranked = choices_Tk.sort(dim=-1).values
    twice = (ranked.diff(dim=-1) == 0) & (ranked[..., 1:] >= 0)
    ok = (choices_Tk < num_experts).all() & ~twice.any()
    require(ok, f"choices must be below num_experts={num_experts} and different in each token")


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
    if k > _FEW or k == 0:
        return values_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    lowest = torch.finfo(values_TE.dtype).min
    left = values_TE.clamp(min=lowest)
    found = []
    for _ in range(k):
        found.append(left.argmax(dim=-1, keepdim=True))
        left = left.scatter(-1, found[-1], float("-inf"))
    return torch.cat(found, dim=-1)


def take_scores(scores_TE: Tensor, choices_Tk: Tensor) -> Tensor:
    """The score of each choice [T k], 0 where it is negative; a row's other choices differ."""
    return _TakeScores.apply(scores_TE, choices_Tk)


def weights_of(
    logits_TE: Tensor,
    scores_TE: Tensor,
    choices_Tk: Tensor,
    score: Score,
    renormalize: bool | float,
) -> Tensor:
    """Weights of the choices [T k]: their scores, over the norm of each token's if asked for."""
    if renormalize is True and score == "softmax":
        # The same as a quotient of scores, which may all be too small for one.
        chosen = take_scores(logits_TE, choices_Tk)
        lowest = torch.finfo(chosen.dtype).min
        weights = chosen.masked_fill(choices_Tk < 0, lowest).softmax(dim=-1)
        return weights.masked_fill(choices_Tk < 0, 0)
    weights = take_scores(scores_TE, choices_Tk)
    return weights if renormalize is False else _over_norm(weights, float(renormalize))


def _over_norm(weights_Tk: Tensor, p: float) -> Tensor:
    norm = torch.linalg.vector_norm(weights_Tk, ord=p, dim=-1, keepdim=True)
    return weights_Tk / norm.clamp(min=_tiny(weights_Tk))


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


class _TakeScores(torch.autograd.Function):
    """``gather``, whose own backward adds by atomics."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, choices_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(choices_Tk)
        ctx.num_experts = scores_TE.shape[-1]
        return scores_TE.gather(-1, choices_Tk.clamp(min=0)).masked_fill(choices_Tk < 0, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_Tk: Tensor) -> tuple[Tensor | None, ...]:
        (choices_Tk,) = ctx.saved_tensors
        # Slots without an expert write to a column of their own.
        places = torch.where(choices_Tk < 0, ctx.num_experts, choices_Tk)
        wide = dy_Tk.new_zeros(dy_Tk.shape[0], ctx.num_experts + 1).scatter(-1, places, dy_Tk)
        return wide[:, :-1], None
