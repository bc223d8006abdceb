"""Cross-entropy of logits whose vocabulary is split over a group (Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3).

Dimensions: T tokens (any number of dimensions), V the whole vocabulary; v is this rank's
columns, and c those of them that are not padding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megablocks_core.groups import LOCAL, Group, check_group, chunk_slice
from megablocks_core.parallel.checks import (
    check_reduction,
    check_targets,
    check_tensors,
    check_vocab_size,
    require,
)

# Logits in a block whose float32 form fits a CPU's cache.
_BLOCK = 1 << 18


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    group: Group = LOCAL,
) -> Tensor:
    """Cross-entropy of whole logits, from this rank's columns of them.

    The loss of a token is that of ``torch.nn.functional.cross_entropy`` plus a term that
    keeps the logits from drifting::

        lse - (1 - label_smoothing) * x[target] - label_smoothing * mean(x) + z_loss * lse**2

    with ``lse = logsumexp(x)`` and the mean over the whole vocabulary (torch's rule). An
    ignored token has exactly zero loss and gradient, even where its logits are infinite.

    Computed and returned in float32, or float64 for float64 logits, and equal on every rank;
    the gradient has the dtype of the logits. Logits are never changed. Saved for backward are
    the logits as they came and four numbers a token; backward computes the softmax again.

    Sends two messages forward, a maximum and a sum of two or three numbers a token, and none
    backward. The host waits for no device.

    Args:
        logits: This rank's columns [T v]; ranks may hold unequal numbers of them, or none.
        targets: Indices into the whole vocabulary [T], of any integer dtype, equal on every rank.
        vocab_size: V. Columns are cut by ``torch.chunk``'s rule, or all ranks hold the same
            number of them and those from V on are padding, which never enters. Without it all
            columns are real, any cut is right, and V is the sum of the ranks' columns.
        ignore_index: Tokens with this target are left out.
        label_smoothing: Weight of the uniform distribution over the vocabulary.
        z_loss: Weight of the square of ``lse``.
        reduction: "none" gives [T]; "sum" their sum; "mean" the sum divided by the number of
            tokens that are not ignored, or zero if all are (torch: NaN).
        group: The ranks that share the vocabulary.

    Raises:
        ValueError: Shapes, dtypes or options do not fit; a target is neither in the vocabulary nor
            ignored; or the logits are gathered already. The last is known where ``vocab_size``
            is given; where not, it is concluded from logits that are equal on all ranks and
            not constant. In compiled code and on other devices than the CPU, what depends on
            values is asserted asynchronously.
    """
    check_group(group)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    try:
        check_tensors(logits=logits, targets=targets)
        check_targets(targets, ignore_index=ignore_index, **terms)
        _check(logits, targets)
        check_vocab_size(vocab_size)
        check_reduction(reduction)
    except ValueError:
        _refuse(logits, vocab_size is not None, group)
        raise
    x_Tc, targets = logits.detach(), targets.long()
    same = (label_smoothing, z_loss, ignore_index)
    if vocab_size is None:
        top_T, start, whole = _maxima_and_cut(x_Tc, same, group)
    else:
        step, whole = _step(logits.shape[-1], vocab_size, group), vocab_size
        start = step * group.rank
        x_Tc = x_Tc[..., : max(whole - start, 0)]
        top_T, alike = _maxima(x_Tc, step, same, group)
        if step == 0:
            raise ValueError(
                f"logits have {logits.shape[-1]} columns and must have this rank's share of "
                f"vocab_size={vocab_size} over a group of {group.size} ranks, or be padded alike "
                "on all; are they gathered already?"
            )
        require(alike, "logits must be cut alike on all ranks")

    valid_T = targets != ignore_index
    outside_T = valid_T & ((targets < 0) | (targets >= whole))
    index_T = targets - start
    hint = "; logits that are cut over ranks need their group=" * (group.size == 1)
    sums = _sums(x_Tc, top_T, index_T, outside_T, smoothed=label_smoothing > 0, group=group)
    rule = "targets must lie in the vocabulary or equal ignore_index"
    require(
        sums.outside == 0,
        rule,
        lambda: f"{rule}; found {targets[outside_T][:5].tolist()} with {int(whole)} entries{hint}",
    )
    even = torch.full_like(sums.outside, label_smoothing) / whole
    options = _Options(label_smoothing, z_loss, x_Tc.shape[-1])
    losses_T = _Losses.apply(logits, top_T, sums, index_T, valid_T, even, options)
    if reduction == "none":
        return losses_T
    total = losses_T.sum()
    return total if reduction == "sum" else total / valid_T.sum().clamp(min=1)


class _Options(NamedTuple):
    label_smoothing: float
    z_loss: float
    num_columns: int


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} must have the shape of targets, "
            f"{tuple(targets.shape)}, and one more dimension for this rank's columns"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits of {logits.dtype} must be floating-point numbers")


def _refuse(logits: Tensor, known: bool, group: Group) -> None:
    """Let other ranks hear, in the first message, that this one raises instead."""
    if torch.compiler.is_compiling() or not isinstance(logits, Tensor):
        return
    if logits.dim() == 0 or not logits.is_floating_point():
        return
    top_T = _own_maxima(logits[..., :0]).flatten()
    same = top_T.new_full((6,), torch.inf)
    extra = top_T.new_zeros(2 if known else 2 + group.size)
    group.all_reduce(torch.cat([top_T, same, extra]), "max")


def _step(width: int, vocab_size: int, group: Group) -> int:
    """How far apart the ranks' first columns are: by ``torch.chunk``'s rule, or padded alike.

    0 if this rank's ``width`` follows neither. It raises only when all ranks have heard of it.
    """
    own = chunk_slice(vocab_size, group.size, group.rank)
    if width == own.stop - own.start:
        return -(-vocab_size // group.size)
    padded = width * group.size >= vocab_size and (width < vocab_size or group.size == 1)
    return width if padded else 0


def _maxima(x_Tc: Tensor, step: int, same: Sequence[float], group: Group) -> tuple[Tensor, Tensor]:
    """The largest logit of each token, and whether all ranks have the same ``step``."""
    top_T = _own_maxima(x_Tc)
    top_T, steps = _all_max(top_T, _pairs(top_T.new_full((1,), step)), same, group)
    return top_T, _are_equal(steps)


def _maxima_and_cut(
    x_Tv: Tensor, same: Sequence[float], group: Group
) -> tuple[Tensor, int | Tensor, int | Tensor]:
    """The largest logit of each token, this rank's first column and the number of columns."""
    width, top_T = x_Tv.shape[-1], _own_maxima(x_Tv)
    if group.size == 1:
        return top_T, 0, width
    widths = width * torch.arange(group.size, device=top_T.device).eq(group.rank)
    top_T, heard = _all_max(top_T, torch.cat([_fingerprint(x_Tv, top_T), widths]), same, group)
    require(~_are_equal(heard[:2]), "logits are equal on all ranks; are they gathered already?")
    widths = heard[2:].long()
    return top_T, widths[: group.rank].sum(), widths.sum()


def _own_maxima(x_Tc: Tensor) -> Tensor:
    wide = torch.float64 if x_Tc.dtype == torch.float64 else torch.float32
    if x_Tc.shape[-1] == 0:
        return x_Tc.new_full(x_Tc.shape[:-1], -torch.inf, dtype=wide)
    return x_Tc.amax(-1).to(wide)


def _all_max(
    top_T: Tensor, extra: Tensor, same: Sequence[float], group: Group
) -> tuple[Tensor, Tensor]:
    """Maxima over the ranks, in one message; raises where ``same`` is not."""
    if group.size == 1:
        return top_T, extra
    own = torch.stack([top_T.new_full((), value) for value in same])
    parts = (top_T.flatten(), _pairs(own), extra.to(top_T.dtype))
    heard = group.all_reduce(torch.cat(parts), "max")
    top, pairs, extra = heard.split([part.numel() for part in parts])
    require(
        _are_equal(pairs),
        "label_smoothing, z_loss and ignore_index must be the same on all ranks, and no rank "
        "may have refused its arguments",
    )
    return top.view(top_T.shape), extra


def _pairs(values: Tensor) -> Tensor:
    """What tells, after a maximum over the ranks, whether all of them had the same values."""
    return torch.cat([values, -values])


def _are_equal(pairs: Tensor) -> Tensor:
    highest, lowest = pairs.chunk(2)
    return (highest == -lowest).all()


def _fingerprint(x_Tv: Tensor, top_T: Tensor) -> Tensor:
    """A pair that is equal on all ranks if their logits are, unless constant or infinite.

    It rests on the first token's logits and on every token's largest.
    """
    if x_Tv.shape[-1] < 2 or top_T.numel() == 0:
        return top_T.new_full((2,), torch.inf)
    first_v = x_Tv[(0,) * top_T.dim()].to(top_T.dtype)
    values = torch.cat([first_v, top_T.flatten()])
    weights = torch.arange(len(values), device=values.device).to(values.dtype).cos()
    total = (values * weights).sum()
    says_nothing = (first_v.min() == first_v.max()) | ~total.isfinite()
    return torch.where(says_nothing, torch.inf, _pairs(total.view(1)))


class _Sums(NamedTuple):
    """Sums over the vocabulary, of logits less the token's largest."""

    exp_T: Tensor
    target_T: Tensor
    all_T: Tensor | None
    outside: Tensor


def _sums(
    x_Tc: Tensor,
    top_T: Tensor,
    index_T: Tensor,
    outside_T: Tensor,
    *,
    smoothed: bool,
    group: Group,
) -> _Sums:
    """Sums over all ranks' columns, and the number of targets outside, in one message."""
    num_tokens, num_columns = top_T.numel(), x_Tc.shape[-1]
    x_Nc, top_N = x_Tc.reshape(num_tokens, num_columns), top_T.reshape(num_tokens, 1)
    index_N = index_T.reshape(num_tokens, 1)
    own = top_T.new_zeros(3 if smoothed else 2, num_tokens)
    for rows in _row_blocks(x_Nc):
        x_nc = x_Nc[rows].to(top_N.dtype) - top_N[rows]
        if num_columns:
            here_n, place_n = _place(index_N[rows], num_columns)
            own[1, rows] = torch.where(here_n, x_nc.gather(-1, place_n), 0.0).squeeze(-1)
        if smoothed:
            own[2, rows] = x_nc.sum(-1)
        own[0, rows] = x_nc.exp_().sum(-1)
    heard = group.all_reduce(torch.cat([own.flatten(), outside_T.sum().view(1)]))
    exp_T, target_T, *all_T = heard[:-1].view(len(own), *top_T.shape)
    return _Sums(exp_T, target_T, all_T[0] if smoothed else None, heard[-1])


def _row_blocks(x_Nc: Tensor) -> list[slice]:
    """Rows to work on at a time, so that wide temporaries stay in a CPU's cache."""
    num_rows, num_columns = x_Nc.shape
    if torch.compiler.is_compiling() or x_Nc.device.type != "cpu":
        return [slice(0, num_rows)]
    step = max(1, _BLOCK // max(num_columns, 1))
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _place(index_T: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether each token's target is one of this rank's columns, and a column to look at."""
    return (index_T >= 0) & (index_T < num_columns), index_T.clamp(0, num_columns - 1)


class _Losses(torch.autograd.Function):
    """The tokens' losses from sums over the vocabulary, and their gradient in the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        top_T: Tensor,
        sums: _Sums,
        index_T: Tensor,
        valid_T: Tensor,
        even: Tensor,
        options: _Options,
    ) -> Tensor:
        exp_T, target_T, all_T, _ = sums
        log_T = exp_T.log()
        losses_T = log_T - (1 - options.label_smoothing) * target_T
        if all_T is not None:
            losses_T = losses_T - even * all_T
        if options.z_loss:
            losses_T = losses_T + options.z_loss * (log_T + top_T).square()
        ctx.save_for_backward(logits_Tv, top_T, exp_T, index_T, valid_T, even)
        ctx.options = options
        return losses_T.masked_fill(~valid_T, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_Tv, top_T, exp_T, index_T, valid_T, even = ctx.saved_tensors
        label_smoothing, z_loss, num_columns = ctx.options
        num_tokens, num_padding = top_T.numel(), logits_Tv.shape[-1] - num_columns
        scale_T = dlosses_T / exp_T
        if z_loss:
            scale_T = scale_T * (1 + 2 * z_loss * (exp_T.log() + top_T))
        hit_T = (label_smoothing - 1) * dlosses_T
        even_T = even * dlosses_T

        x_Nc = logits_Tv[..., :num_columns].reshape(num_tokens, num_columns)
        top_N, scale_N, hit_N, even_N, index_N, valid_N = (
            x_T.reshape(num_tokens, 1) for x_T in (top_T, scale_T, hit_T, even_T, index_T, valid_T)
        )
        dx_Nc = torch.empty_like(x_Nc)
        for rows in _row_blocks(x_Nc):
            dx_nc = (x_Nc[rows].to(top_N.dtype) - top_N[rows]).exp_().mul_(scale_N[rows])
            if label_smoothing:
                dx_nc.sub_(even_N[rows])
            if num_columns:
                here_n, place_n = _place(index_N[rows], num_columns)
                dx_nc.scatter_add_(-1, place_n, torch.where(here_n, hit_N[rows], 0.0))
            dx_Nc[rows] = dx_nc.masked_fill_(~valid_N[rows], 0.0)
        dx_Tv = dx_Nc.view(*top_T.shape, num_columns)
        if num_padding:
            dx_Tv = pad(dx_Tv, (0, num_padding))
        return dx_Tv, *[None] * 6
