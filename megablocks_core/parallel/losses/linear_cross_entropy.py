"""A head and its cross-entropy, without the logits (chunks of tokens, gradients along with the
loss: Liger Kernel, https://arxiv.org/abs/2410.10989, section 3.2).

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features, V the whole vocabulary; v is this rank's share of V, and b a block of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.parallel.checks import check_targets, check_tensors
from megablocks_core.parallel.losses.chunked_head import Criterion, merge_exponentials
from megablocks_core.parallel.losses.chunked_loss import check_head, check_options, reduced_loss
from megablocks_core.parallel.losses.head_loss import HeadLoss, Pointers, one_operation
from megablocks_core.parallel.losses.softmax_blocks import (
    Terms,
    make_gradients_,
    prepare_,
    softmax_sums_,
    takes_bfloat16,
)
from megablocks_core.parallel.losses.token_chunks import Chunk
from megablocks_core.parallel.tensor.vocabulary import Columns, refuse


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
    for a chunk of tokens at a time, 128 MiB of them on CPU at most, whatever T is; where a CPU
    multiplies bfloat16, for a block of its columns, and for "sum" and "mean" twice. Ignored
    tokens are not computed at all: their loss and gradients are exactly zero. Minus the losses
    of ``reduction="none"`` are the targets' log-probabilities, with their gradients.

    Computed and returned in float32, or float64 if ``hidden`` or ``weight`` is; gradients have
    the dtypes of what they are of, and that of the weight is summed in at least float32. For
    "sum" and "mean" forward computes the gradients too, and a first backward scales them in
    place; a second one through a retained graph computes them again. For "none" backward
    computes the logits again. Saved for backward are the inputs themselves and, for "sum" and
    "mean", the gradients.

    Over several ranks forward sends six integers, and for each chunk an all-gather of three
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
    check_group(group)
    check_tensors(hidden=hidden)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    try:
        cut = group if sequence_parallel else LOCAL
        check_tensors(weight=weight, targets=targets)
        check_targets(targets, ignore_index=ignore_index, **terms)
        check_head(hidden, weight, bias, targets.shape, cut, "targets")
        check_options(vocab_size, soft_cap, reduction)
    except ValueError:
        refuse(group, hidden.device)
        raise
    targets = targets.long()
    tensors, numbers = [targets != ignore_index, targets], [label_smoothing, z_loss]
    where = sequence_parallel, group
    loss = HeadLoss(_Formula, tensors, numbers, "", vocab_size, soft_cap, *where)
    return reduced_loss(hidden, weight, bias, loss, reduction)


class _Formula(NamedTuple):
    """Cross-entropy with its terms."""

    targets: Tensor
    label_smoothing: float
    z_loss: float

    others = 0

    @property
    def narrow(self) -> bool:
        return takes_bfloat16()

    @staticmethod
    def operation() -> Callable[..., Any]:
        return _operation

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float], word: str) -> "_Formula":
        (targets,), (label_smoothing, z_loss) = tensors, numbers
        return cls(targets, label_smoothing, z_loss)

    def pointers(self, counts: Tensor) -> Pointers:
        return Pointers(self.targets, counts, "targets")

    def criteria(
        self, columns: Columns, wide: torch.dtype, chunks: list[Chunk], *, kept: bool, cut: Group
    ) -> Callable[[Chunk], Criterion]:
        targets_N = self.targets.reshape(-1)
        return lambda chunk: _CrossEntropy(
            targets_N[chunk.places], self.label_smoothing, self.z_loss, columns.whole
        )


_operation = one_operation("linear_cross_entropy", _Formula)


class _CrossEntropy(NamedTuple):
    """Maximum, sum of exponentials, the target's logit and, if smoothed, the sum of logits."""

    targets_n: Tensor
    label_smoothing: float
    z_loss: float
    whole: int

    def partial_(self, x_nb: Tensor, first: int) -> Tensor:
        smoothed = bool(self.label_smoothing)
        return softmax_sums_(x_nb, self.targets_n - first, all_logits=smoothed)

    def prepare_(self, x_nb: Tensor, first: int, top_n: Tensor) -> None:
        prepare_(x_nb, top_n)

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
        factor_n = scale_n / exp_n
        if self.z_loss:
            factor_n = factor_n * (1 + 2 * self.z_loss * (exp_n.log() + top_n))
        smoothing = self.label_smoothing / self.whole
        shift_n = smoothing * scale_n if self.label_smoothing else None
        terms = Terms(top_n, factor_n, shift_n, (self.label_smoothing - 1) * scale_n)
        make_gradients_(x_nb, self.targets_n - first, part_kn[0], terms)
