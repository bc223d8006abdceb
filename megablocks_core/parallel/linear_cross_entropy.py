"""A head and its cross-entropy, without the logits (chunks of tokens, gradients along with the
loss: Liger Kernel, https://arxiv.org/abs/2410.10989, section 3.2).

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features, V the whole vocabulary; v is this rank's share of V, and b a block of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.chunked_head import (
    HeadLogits,
    chunk_length,
    maxima,
    merge_exponentials,
    run_chunks,
    wide_dtype,
)
from megablocks_core.parallel.chunked_loss import (
    check_head,
    group_named,
    token_losses,
    total_loss,
)
from megablocks_core.parallel.head_gradients import Gradients, Head, Wanted
from megablocks_core.parallel.token_chunks import chunk_tokens
from megablocks_core.parallel.vocabulary import agree_on_columns


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    sequence_parallel: bool = False,
    group: Group = LOCAL,
) -> Tensor:
    """``vocab_parallel_cross_entropy`` of ``hidden @ weight.T + bias``, whose result never exists.

    The loss is that of the logits ``x``, or of ``soft_cap * tanh(x / soft_cap)``. Logits exist
    for a chunk of tokens at a time, 128 MiB of them on CPU at most, whatever T is. Ignored
    tokens are not computed at all: their loss and gradients are exactly zero. Minus the losses
    of ``reduction="none"`` are the targets' log-probabilities, with their gradients.

    Computed and returned in float32, or float64 if ``hidden`` or ``weight`` is; gradients have
    the dtypes of what they are of, and that of the weight is summed in at least float32. For
    "sum" and "mean" forward computes the gradients too, and a first backward scales them in
    place; a second one through a retained graph computes them again. For "none" backward
    computes the logits again. Saved for backward are the inputs themselves and, for "sum" and
    "mean", the gradients.

    Over several ranks forward sends five integers, and for each chunk an all-gather of three
    or four numbers a token; "sum" and "mean" all-reduce the chunk's gradient of ``hidden``
    while the next chunk is computed, and send nothing backward. Under sequence parallelism
    each chunk's hidden states are all-gathered, and their gradient reduce-scattered. For
    "none" backward sends what forward sent, and the gradients. The host waits for the number
    of tokens that count.

    Args:
        hidden: [T H], equal on every rank; or this rank's tokens under sequence parallelism.
        weight: This rank's rows [v H] of the head; ranks may hold unequal numbers of them.
        targets: Indices into the whole vocabulary [T], of any integer dtype, of all tokens
            and equal on every rank.
        bias: This rank's entries [v].
        vocab_size: V. Rows are cut by ``torch.chunk``'s rule, or all ranks hold the same
            number of them and those from V on are padding, which never enters. Without it
            all rows are real, any cut is right, and V is the sum of the ranks' rows.
        ignore_index: Tokens with this target are left out.
        label_smoothing: Weight of the uniform distribution over the vocabulary.
        z_loss: Weight of the square of ``logsumexp(x)``.
        soft_cap: A bound of the logits' magnitude.
        reduction: "none" gives [T]; "sum" their sum, to be divided by a global count where
            there is one; "mean" the sum divided by the number of tokens that are not
            ignored, or zero if all are.
        sequence_parallel: ``hidden`` is cut along dim -2 by ``torch.chunk``'s rule.
        group: The ranks that share the vocabulary.

    Raises:
        ValueError: Shapes, dtypes or options do not fit; a target is neither in the vocabulary
            nor ignored, or differs between ranks; or the weight is whole already. The last is
            known where ``vocab_size`` is given; where not, it is concluded from weights that
            are equal on all ranks.
    """
    cut = group if sequence_parallel else LOCAL
    check_head(hidden, weight, bias, targets.shape, cut, "targets")
    _check_options(targets, label_smoothing, soft_cap, reduction)
    job = _Job(
        targets.long(),
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        soft_cap,
        sequence_parallel,
        group,
    )
    valid = targets != ignore_index
    if reduction == "none":
        return token_losses(hidden, weight, bias, job, valid)
    return total_loss(hidden, weight, bias, job, valid, mean=reduction == "mean")


def _check_options(
    targets: Tensor, label_smoothing: float, soft_cap: float | None, reduction: str
) -> None:
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets of {targets.dtype} must be integers: the indices of classes")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction={reduction!r} must be "none", "sum" or "mean"')


class _Job(NamedTuple):
    targets: Tensor
    vocab_size: int | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    sequence_parallel: bool
    group: Group

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        wanted: Wanted,
    ) -> tuple[Tensor, Gradients]:
        if not torch.compiler.is_compiling():
            return _run(hidden, weight, bias, scale, wanted, self)
        losses, *gradients = _opaque(
            hidden,
            weight,
            bias,
            scale,
            list(wanted),
            self.targets,
            self.vocab_size,
            self.ignore_index,
            [self.label_smoothing, self.z_loss],
            self.soft_cap,
            self.sequence_parallel,
            self.group.name,
        )
        dhidden, dweight, dbias = (
            gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)
        )
        return losses, (dhidden, dweight, dbias)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    wanted: Wanted,
    job: _Job,
) -> tuple[Tensor, Gradients]:
    targets, group, wide = job.targets, job.group, wide_dtype(hidden, weight)
    valid = targets != job.ignore_index
    columns = agree_on_columns(
        weight,
        targets,
        valid,
        vocab_size=job.vocab_size,
        group=group,
        names=("weight", "targets"),
    )
    head = Head(weight, bias, job.soft_cap)
    cut = group if job.sequence_parallel else LOCAL
    chunks = chunk_tokens(valid, chunk_length(head, columns, wide), cut=cut)
    targets_N = targets.reshape(-1)
    losses, (dhidden, dweight, dbias) = run_chunks(
        hidden.reshape(-1, hidden.shape[-1]),
        HeadLogits(head, columns, wide, chunks, kept=any(wanted)),
        lambda chunk: _CrossEntropy(
            targets_N[chunk.places], job.label_smoothing, job.z_loss, columns.whole
        ),
        chunks,
        scale_N=scale.expand(targets.shape).reshape(-1),
        wanted=wanted,
        group=group,
        sequence_parallel=job.sequence_parallel,
    )
    dhidden = None if dhidden is None else dhidden.view(hidden.shape)
    return losses.view(targets.shape), (dhidden, dweight, dbias)


class _CrossEntropy(NamedTuple):
    """Maximum, sum of exponentials, the target's logit and, if smoothed, the sum of logits."""

    targets_n: Tensor
    label_smoothing: float
    z_loss: float
    whole: int

    def partial_(self, x_nb: Tensor, first: int) -> Tensor:
        top_n, target_n = maxima(x_nb), self._target_logits(x_nb, first)
        others = [target_n, x_nb.sum(-1)] if self.label_smoothing else [target_n]
        x_nb.sub_(top_n.unsqueeze(-1)).exp_()
        return torch.stack([top_n, x_nb.sum(-1), *others])

    def merge(self, parts_Pkn: Tensor) -> Tensor:
        top_Pn, exp_Pn, *others_Pn = parts_Pkn.unbind(1)
        merged = merge_exponentials(top_Pn, exp_Pn)
        return torch.stack([*merged, *(x_Pn.sum(0) for x_Pn in others_Pn)])

    def losses(self, sums_kn: Tensor) -> Tensor:
        # In float64: the logit and the maximum may be large and nearly equal.
        top_n, exp_n, target_n, *all_n = sums_kn.double()
        lse_n = exp_n.log() + top_n
        losses_n = lse_n - (1 - self.label_smoothing) * target_n + self.z_loss * lse_n.square()
        for x_n in all_n:
            losses_n = losses_n - self.label_smoothing / self.whole * x_n
        return losses_n

    def differentiate_(
        self, x_nb: Tensor, first: int, part_kn: Tensor, sums_kn: Tensor, scale_n: Tensor
    ) -> None:
        top_n, exp_n = sums_kn[:2]
        factor_n = (part_kn[0] - top_n).exp_() * scale_n / exp_n
        if self.z_loss:
            factor_n = factor_n * (1 + 2 * self.z_loss * (exp_n.log() + top_n))
        x_nb.mul_(factor_n.unsqueeze(-1))
        if self.label_smoothing:
            x_nb.sub_((self.label_smoothing / self.whole * scale_n).unsqueeze(-1))
        here_n, place_n = self._places(x_nb, first)
        if x_nb.shape[-1]:
            hit_n = torch.where(here_n, (self.label_smoothing - 1) * scale_n, 0.0)
            x_nb.scatter_add_(-1, place_n.unsqueeze(-1), hit_n.unsqueeze(-1))

    def _target_logits(self, x_nb: Tensor, first: int) -> Tensor:
        here_n, place_n = self._places(x_nb, first)
        if x_nb.shape[-1] == 0:
            return x_nb.new_zeros(len(x_nb))
        return torch.where(here_n, x_nb.gather(-1, place_n.unsqueeze(-1)).squeeze(-1), 0.0)

    def _places(self, x_nb: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Whether each token's target is in this block, and a column to look at."""
        index_n, width = self.targets_n - first, x_nb.shape[-1]
        return (index_n >= 0) & (index_n < width), index_n.clamp(0, max(width - 1, 0))


# For the compiler one operation, so that neither lengths nor chunks enter its graph.
@torch.library.custom_op("megablocks_core::linear_cross_entropy", mutates_args=())
def _opaque(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    wanted: list[bool],
    targets: Tensor,
    vocab_size: int | None,
    ignore_index: int,
    weights: list[float],
    soft_cap: float | None,
    sequence_parallel: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    label_smoothing, z_loss = weights
    job = _Job(
        targets,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        soft_cap,
        sequence_parallel,
        group_named(group_name),
    )
    losses, gradients = _run(hidden, weight, bias, scale, Wanted(*wanted), job)
    dhidden, dweight, dbias = (
        hidden.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    return losses, dhidden, dweight, dbias


@_opaque.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others) -> tuple[Tensor, ...]:
    _, (wants_hidden, wants_weight, wants_bias), targets, *_ = others
    wide = wide_dtype(hidden, weight)
    return (
        targets.new_empty(targets.shape, dtype=wide),
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if wants_weight else hidden.new_empty(0),
        torch.empty_like(bias) if wants_bias and bias is not None else hidden.new_empty(0),
    )
