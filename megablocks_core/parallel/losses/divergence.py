"""Kullback-Leibler divergence of logits whose vocabulary is split over a group (distillation:
https://arxiv.org/abs/1503.02531, section 2).

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n some of them,
V the whole vocabulary, K stored entries of a token; v is this rank's columns, and c those of
them that are not padding. k numbers a token add up over the ranks' columns.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.parallel.checks import (
    check_positive,
    check_reduction,
    check_tensors,
    check_vocab_size,
    require,
)
from megablocks_core.parallel.losses.chunked_head import Criterion, from_all_ranks, wide_dtype
from megablocks_core.parallel.losses.divergence_criteria import TopKTeacher, WholeTeacher
from megablocks_core.parallel.tensor.vocabulary import Columns, agree_on_columns, refuse

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# How far above zero the logarithm of a mass of 1 may lie, for stored numbers of 16 bits.
_ROUNDED = 0.1

# Logits in a block whose wide form fits a CPU's cache.
_BLOCK = 1 << 18


class StoredTopK(NamedTuple):
    """The largest probabilities of a teacher, stored with their places.

    Attributes:
        log_probs: Their logarithms at temperature 1 [T K].
        indices: Their places in the whole vocabulary [T K], each at most once for a token.
        missing: What becomes of the mass that is not stored. "bucket": all other columns are
            one class, of teacher and student alike, so that the divergence is a lower bound
            of the whole one and zero for equal models; the teacher's mass in it is at least
            the precision of the stored numbers. It is known at temperature 1 alone.
            "renormalize": there is none, and the stored ones are scaled to a sum of 1.
    """

    log_probs: Tensor
    indices: Tensor
    missing: str = "bucket"


def vocab_parallel_kl(
    logits: Tensor,
    teacher: Tensor | StoredTopK,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    direction: str = "forward",
    temperature: float = 1.0,
    reduction: str = "mean",
    group: Group = LOCAL,
) -> Tensor:
    """Divergence of a student's logits and a teacher's, from this rank's columns of them.

    With ``p = softmax(logits / temperature)`` and ``q`` that of the teacher, forward is
    ``sum(q * log(q / p))`` and reverse ``sum(p * log(p / q))``. Neither is multiplied by the
    square of the temperature. A column of which the distribution in front has no mass (logit
    -inf) adds nothing. The teacher is a constant.

    Computed and returned in float32, or float64 if the logits are, and equal on every rank;
    the gradient has the dtype of the logits. Saved for backward are logits and teacher as they
    came and a few numbers a token: five, or K + 2 with a stored teacher.

    Over several ranks forward sends six integers, for which the host waits, and one
    all-gather of those numbers; backward sends nothing.

    Args:
        logits: This rank's columns [T v]; ranks may hold unequal numbers of them, or none.
        teacher: Its logits [T v], cut alike; or what is stored of it, equal on every rank.
        vocab_size: V. Columns are cut by ``torch.chunk``'s rule, or all ranks hold the same
            number of them and those from V on are padding, which never enters. Without it all
            columns are real, and V is the sum of the ranks' columns.
        mask: Which tokens count [T], equal on every rank; others have zero loss and gradient.
        direction: "forward" (teacher in front; covers all its modes) or "reverse" (student in
            front; seeks one).
        temperature: Divides the logits of both.
        reduction: "none" gives [T]; "sum" their sum; "mean" the sum divided by the number of
            tokens that count, or zero if there is none.
        group: The ranks that share the vocabulary.

    Raises:
        ValueError: Shapes or options do not fit; a stored index is not in the vocabulary, or
            differs between ranks; logits are gathered already; or a stored teacher cannot say:
            the mass of its "bucket" at another temperature than 1, or "reverse" where it has
            been renormalized and the divergence is infinite.
    """
    check_group(group)
    check_tensors(logits=logits)
    tokens = logits.shape[:-1]
    try:
        _check_logits(logits, teacher)
        check_divergence(direction, temperature, mask, tokens)
        check_vocab_size(vocab_size)
        check_reduction(reduction)
        if isinstance(teacher, StoredTopK):
            check_stored(teacher, tokens, direction, temperature)
    except ValueError:
        refuse(group, logits.device)
        raise
    if mask is None:
        mask = torch.ones(tokens, dtype=torch.bool, device=logits.device)
    tensors = [teacher] if isinstance(teacher, Tensor) else [teacher.log_probs, teacher.indices]
    missing = teacher.missing if isinstance(teacher, StoredTopK) else ""
    options = _Options(vocab_size, direction, temperature, missing, group)
    losses = _Losses.apply(logits, mask, options, *(x.detach() for x in tensors))
    return reduced(losses, mask, reduction)


def _check_logits(logits: Tensor, teacher: Tensor | StoredTopK) -> None:
    if logits.dim() == 0 or not logits.is_floating_point():
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} must be numbers [T v]")
    if isinstance(teacher, StoredTopK):
        return
    if not isinstance(teacher, Tensor):
        raise ValueError(
            f"teacher of type {type(teacher).__name__} must be a tensor of logits or a StoredTopK"
        )
    if teacher.shape != logits.shape:
        raise ValueError(
            f"teacher of shape {tuple(teacher.shape)} must have the shape of logits, "
            f"{tuple(logits.shape)}"
        )
    if not teacher.is_floating_point():
        raise ValueError(f"teacher of {teacher.dtype} must be floating-point numbers")


def check_divergence(
    direction: str, temperature: float, mask: Tensor | None, tokens: torch.Size
) -> None:
    """Raise where an option is none of its choices, or the mask is not one of the tokens."""
    if direction not in ("forward", "reverse"):
        raise ValueError(f'direction={direction!r} must be "forward" or "reverse"')
    check_positive("temperature", temperature)
    if mask is not None:
        check_tensors(mask=mask)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens):
        raise ValueError(
            f"mask {tuple(mask.shape)} of {mask.dtype} must be booleans {tuple(tokens)}"
        )


def check_stored(
    teacher: StoredTopK, tokens: torch.Size, direction: str, temperature: float
) -> None:
    """Raise where a stored teacher does not fit the tokens, or cannot say what is asked."""
    log_probs, indices, missing = teacher
    check_tensors(log_probs=log_probs, indices=indices)
    if log_probs.shape != indices.shape or log_probs.shape[:-1] != tokens or log_probs.dim() == 0:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and indices {tuple(indices.shape)} must have "
            f"the shape {tuple(tokens)} and one more dimension for the stored entries"
        )
    if not log_probs.is_floating_point() or indices.dtype not in _INTEGERS:
        raise ValueError(
            f"log_probs of {log_probs.dtype} and indices of {indices.dtype} must be "
            "floating-point numbers and integers"
        )
    if not indices.shape[-1]:
        raise ValueError("log_probs and indices must store at least one entry of each token")
    if missing not in ("bucket", "renormalize"):
        raise ValueError(f'missing={missing!r} must be "bucket" or "renormalize"')
    if missing == "bucket" and temperature != 1.0:
        raise ValueError(
            f'temperature={temperature} must be 1 with missing="bucket": the mass that is not '
            "stored is known there alone"
        )
    if missing == "renormalize" and direction == "reverse":
        raise ValueError(
            'direction="reverse" must be "forward" with missing="renormalize": the teacher has '
            "no mass where the student has some, and the divergence is infinite"
        )


def require_distribution(log_probs_nK: Tensor, indices_nK: Tensor) -> None:
    """Raise where a token's stored entries cannot be of one distribution.

    A column named twice would count twice; logits or probabilities are no log-probabilities.
    """
    mass_n = log_probs_nK.double().logsumexp(-1)
    require(
        ((log_probs_nK <= _ROUNDED).all(-1) & ~(mass_n > _ROUNDED)).all(),
        "log_probs must be logarithms of probabilities, which add up to at most 1 for a token",
    )
    sorted_nK = indices_nK.sort(-1).values
    twice = sorted_nK[:, 1:] == sorted_nK[:, :-1]
    require(~twice.any(), "indices must name a column at most once for a token")


def reduced(losses_T: Tensor, mask_T: Tensor, reduction: str) -> Tensor:
    """The losses, their sum, or that over the number of tokens that count."""
    if reduction == "none":
        return losses_T
    total = losses_T.sum()
    return total if reduction == "sum" else total / mask_T.sum().clamp(min=1)


class _Options(NamedTuple):
    vocab_size: int | None
    direction: str
    temperature: float
    missing: str
    group: Group

    def parts(self) -> tuple[int | None, str, float, str, str]:
        """What an opaque operation takes in their place."""
        return *self[:-1], self.group.name


class _Losses(torch.autograd.Function):
    """The tokens' divergences, and their gradient in the student's logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, mask: Tensor, options: _Options, *teacher: Tensor
    ) -> Tensor:
        if torch.compiler.is_compiling():
            results = _opaque_losses(logits, mask, list(teacher), *options.parts())
        else:
            results = _losses(logits, mask, list(teacher), options)
        losses, sums, columns = results
        ctx.options = options
        ctx.save_for_backward(logits, mask, sums, columns, *teacher)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, mask, sums, columns, *teacher = ctx.saved_tensors
        tensors = (logits, mask, teacher, sums, columns, dlosses)
        if torch.compiler.is_compiling():
            dlogits = _opaque_gradient(*tensors, *ctx.options.parts())
        else:
            dlogits = _gradient(*tensors, ctx.options)
        return dlogits, None, None, *[None] * len(teacher)


def _losses(
    logits: Tensor, mask: Tensor, teacher: list[Tensor], options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [T], the numbers [k N] of the whole vocabulary, and this rank's columns of it."""
    stored = len(teacher) > 1
    columns = agree_on_columns(
        logits.reshape(mask.numel(), logits.shape[-1]).t(),
        teacher[1] if stored else torch.zeros_like(mask, dtype=torch.int64),
        mask.unsqueeze(-1) if stored else mask,
        vocab_size=options.vocab_size,
        group=options.group,
        names=("logits", "indices and mask" if stored else "mask"),
        work=f"{options[:-1]} of tokens {list(mask.shape)} of {wide_dtype(logits)}",
    )
    if stored:
        entries = (x.reshape(mask.numel(), x.shape[-1])[mask.reshape(-1)] for x in teacher[:2])
        require_distribution(*entries)
    parts = [
        criterion.partial_(x_nc, columns.first)
        for _, criterion, x_nc in _row_blocks(logits, mask, teacher, columns, options)
    ]
    sums_kN = torch.cat(parts, dim=-1)
    every = _criterion(mask, teacher, slice(None), columns, options, sums_kN.dtype)
    if options.group.size > 1:
        sums_kN = every.merge(from_all_ranks(sums_kN, options.group))
    losses_N = every.losses(sums_kN).to(sums_kN.dtype).masked_fill(~mask.reshape(-1), 0.0)
    return losses_N.view(mask.shape), sums_kN, torch.tensor(columns)


def _gradient(
    logits: Tensor,
    mask: Tensor,
    teacher: list[Tensor],
    sums_kN: Tensor,
    columns: Tensor,
    dlosses: Tensor,
    options: _Options,
) -> Tensor:
    own = Columns(*columns.tolist())
    scale_N = dlosses.masked_fill(~mask, 0.0).reshape(-1)
    dx_Nv = logits.new_zeros(mask.numel(), logits.shape[-1])
    for rows, criterion, x_nc in _row_blocks(logits, mask, teacher, own, options):
        part_kn = criterion.partial_(x_nc, own.first)
        criterion.differentiate_(x_nc, own.first, part_kn, sums_kN[:, rows], scale_N[rows])
        dx_Nv[rows, : own.own] = x_nc.to(logits.dtype)
    return dx_Nv.view(logits.shape)


def _row_blocks(
    logits: Tensor, mask: Tensor, teacher: list[Tensor], columns: Columns, options: _Options
) -> Iterator[tuple[slice, Criterion, Tensor]]:
    """Rows, their divergence, and their logits in new wide memory; zeros where masked."""
    wide = wide_dtype(logits)
    x_Nc = logits.reshape(mask.numel(), logits.shape[-1])[:, : columns.own]
    step = len(x_Nc) if logits.device.type != "cpu" else _BLOCK // max(columns.own, 1)
    step = max(step, 1)
    for start in range(0, max(len(x_Nc), 1), step):
        rows = slice(start, start + step)
        x_nc = x_Nc[rows].to(wide, copy=True)
        x_nc.masked_fill_(~mask.reshape(-1, 1)[rows], 0.0)
        yield rows, _criterion(mask, teacher, rows, columns, options, wide), x_nc


def _criterion(
    mask: Tensor,
    teacher: list[Tensor],
    rows: slice,
    columns: Columns,
    options: _Options,
    wide: torch.dtype,
) -> Criterion:
    teacher = [x.reshape(mask.numel(), x.shape[-1])[rows] for x in teacher]
    mask_n1 = mask.reshape(-1, 1)[rows]
    reverse = options.direction == "reverse"
    if len(teacher) > 1:
        log_probs_nK, indices_nK = teacher
        return TopKTeacher(
            log_probs_nK.masked_fill(~mask_n1, -1.0),  # nothing that could be infinite enters
            indices_nK.long().masked_fill(~mask_n1, 0),
            options.missing == "renormalize",
            reverse,
            options.temperature,
            complete=indices_nK.shape[-1] == columns.whole,
        )

    def logits_of(first: int, width: int) -> Tensor:
        y_nb = teacher[0][:, first - columns.first :][:, :width]
        return y_nb.to(wide).masked_fill(~mask_n1, 0.0) / options.temperature

    return WholeTeacher(logits_of, reverse, options.temperature)


# For the compiler one operation forward and one backward, whose host may wait.
@torch.library.custom_op("megablocks_core::kl_losses", mutates_args=())
def _opaque_losses(
    logits: Tensor,
    mask: Tensor,
    teacher: list[Tensor],
    vocab_size: int | None,
    direction: str,
    temperature: float,
    missing: str,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = Group.named(group_name)
    options = _Options(vocab_size, direction, temperature, missing, group)
    return _losses(logits, mask, teacher, options)


@_opaque_losses.register_fake
def _(logits: Tensor, mask: Tensor, teacher: list[Tensor], *options) -> tuple[Tensor, ...]:
    numbers = teacher[0].shape[-1] + 2 if len(teacher) > 1 else 5
    losses = logits.new_empty(mask.shape, dtype=wide_dtype(logits))
    return losses, losses.new_empty(numbers, mask.numel()), torch.empty(4, dtype=torch.int64)


@torch.library.custom_op("megablocks_core::kl_gradient", mutates_args=())
def _opaque_gradient(
    logits: Tensor,
    mask: Tensor,
    teacher: list[Tensor],
    sums: Tensor,
    columns: Tensor,
    dlosses: Tensor,
    vocab_size: int | None,
    direction: str,
    temperature: float,
    missing: str,
    group_name: str,
) -> Tensor:
    group = Group.named(group_name)
    options = _Options(vocab_size, direction, temperature, missing, group)
    return _gradient(logits, mask, teacher, sums, columns, dlosses, options)


@_opaque_gradient.register_fake
def _(logits: Tensor, *others) -> Tensor:
    return logits.new_empty(logits.shape)
