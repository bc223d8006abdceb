"""A head and its divergence from a teacher, without the logits of either (distillation:
https://arxiv.org/abs/1503.02531, section 2).

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features (a teacher may have others), V the whole vocabulary, K stored entries of a
token; v is this rank's share of V, and b a block of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group, check_group
from megablocks_core.parallel.checks import check_positive, check_tensors
from megablocks_core.parallel.losses.chunked_head import Criterion, HeadLogits, chunk_of
from megablocks_core.parallel.losses.chunked_loss import check_head, check_options, reduced_loss
from megablocks_core.parallel.losses.divergence import (
    StoredTopK,
    check_divergence,
    check_stored,
    require_distribution,
)
from megablocks_core.parallel.losses.divergence_criteria import TopKTeacher, WholeTeacher
from megablocks_core.parallel.losses.head_gradients import Head
from megablocks_core.parallel.losses.head_loss import HeadLoss, Pointers, one_operation
from megablocks_core.parallel.losses.token_chunks import Chunk
from megablocks_core.parallel.tensor.vocabulary import Columns, refuse


class TeacherHead(NamedTuple):
    """A teacher's hidden states and head, cut over the ranks as the student's are.

    Attributes:
        hidden: [T H], H being the teacher's.
        weight: This rank's rows [v H].
        bias: This rank's entries [v].
        soft_cap: A bound of the logits' magnitude.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    soft_cap: float | None = None


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead | StoredTopK,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    direction: str = "forward",
    temperature: float = 1.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    sequence_parallel: bool = False,
    group: Group = LOCAL,
) -> Tensor:
    """``vocab_parallel_kl`` of ``hidden @ weight.T + bias``, whose result never exists.

    Logits exist for a chunk of tokens at a time, and so do those of a ``TeacherHead``. Tokens
    that the mask leaves out are not computed at all. What is computed in which dtype, saved
    and sent is as for ``linear_cross_entropy``; an all-gather for each chunk carries five
    numbers a token, or K + 2 with a stored teacher, and under sequence parallelism another one
    the teacher's hidden states.

    Args:
        hidden: [T H], equal on every rank; or this rank's tokens under sequence parallelism.
        weight: This rank's rows [v H] of the head; ranks may hold unequal numbers of them.
        teacher: Its hidden states and head, cut alike; or what is stored of it for all
            tokens, equal on every rank.
        bias: This rank's entries [v].
        vocab_size: V, as for ``linear_cross_entropy``.
        mask: Which tokens count, of all tokens [T], equal on every rank.
        direction: "forward" or "reverse", as for ``vocab_parallel_kl``.
        temperature: Divides the logits of both.
        soft_cap: A bound of the student's logits' magnitude.
        reduction: "none" gives [T]; "sum" their sum; "mean" the sum divided by the number of
            tokens that count, or zero if there is none.
        sequence_parallel: ``hidden`` is cut along dim -2 by ``torch.chunk``'s rule.
        group: The ranks that share the vocabulary.

    Raises:
        ValueError: As for ``linear_cross_entropy`` and ``vocab_parallel_kl``. Under sequence
            parallelism with a ``TeacherHead`` a mask must say how many tokens there are.
    """
    check_group(group)
    check_tensors(hidden=hidden)
    cut = group if sequence_parallel else LOCAL
    try:
        check_tensors(weight=weight)
        _check_kind(teacher)
        tokens = _tokens(hidden, teacher, mask, cut)
        check_head(hidden, weight, bias, tokens, cut, "mask")
        check_divergence(direction, temperature, mask, tokens)
        check_options(vocab_size, soft_cap, reduction)
        _check_teacher(teacher, weight, tokens, cut, direction, temperature)
    except ValueError:
        refuse(group, hidden.device)
        raise
    if mask is None:
        mask = torch.ones(tokens, dtype=torch.bool, device=hidden.device)
    numbers = [float(direction == "reverse"), temperature]
    if isinstance(teacher, StoredTopK):
        kind, word = _Stored, teacher.missing
        tensors = [teacher.log_probs.detach(), teacher.indices]
    else:
        kind, word = _Whole, ""
        tensors = [x.detach() for x in teacher[:3] if x is not None]
        numbers.append(teacher.soft_cap or 0.0)
    where = sequence_parallel, group
    loss = HeadLoss(kind, [mask, *tensors], numbers, word, vocab_size, soft_cap, *where)
    return reduced_loss(hidden, weight, bias, loss, reduction)


def _check_kind(teacher: object) -> None:
    if not isinstance(teacher, TeacherHead | StoredTopK):
        raise ValueError(
            f"teacher of type {type(teacher).__name__} must be a TeacherHead or a StoredTopK; "
            "logits are for vocab_parallel_kl"
        )
    if isinstance(teacher, TeacherHead):
        check_tensors(teacher_hidden=teacher.hidden, teacher_weight=teacher.weight)


def _check_teacher(
    teacher: TeacherHead | StoredTopK,
    weight: Tensor,
    tokens: torch.Size,
    cut: Group,
    direction: str,
    temperature: float,
) -> None:
    if isinstance(teacher, StoredTopK):
        check_stored(teacher, tokens, direction, temperature)
        return
    check_head(teacher.hidden, teacher.weight, teacher.bias, tokens, cut, "mask")
    check_positive("soft_cap of the teacher", teacher.soft_cap)
    if len(teacher.weight) != len(weight):
        raise ValueError(
            f"weight of the teacher has {len(teacher.weight)} rows and must have "
            f"{len(weight)}, as the student's"
        )


def _tokens(
    hidden: Tensor, teacher: TeacherHead | StoredTopK, mask: Tensor | None, cut: Group
) -> torch.Size:
    """The shape of all tokens."""
    if mask is not None:
        check_tensors(mask=mask)
        return mask.shape
    if isinstance(teacher, StoredTopK):
        return teacher.indices.shape[:-1]
    if cut.size > 1:
        raise ValueError(
            "mask=None must be given under sequence parallelism, where hidden does not say how "
            "many tokens there are"
        )
    return hidden.shape[:-1]


class _Stored(NamedTuple):
    """Divergence from what is stored of a teacher."""

    teacher: StoredTopK
    reverse: bool
    temperature: float

    others = 0
    narrow = False

    @staticmethod
    def operation() -> Callable[..., Any]:
        return _operation_stored

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float], word: str) -> "_Stored":
        (log_probs, indices), (reverse, temperature) = tensors, numbers
        return cls(StoredTopK(log_probs, indices, word), bool(reverse), temperature)

    def pointers(self, counts: Tensor) -> Pointers:
        return Pointers(self.teacher.indices, counts.unsqueeze(-1), "indices and mask")

    def criteria(
        self, columns: Columns, wide: torch.dtype, chunks: list[Chunk], *, kept: bool, cut: Group
    ) -> Callable[[Chunk], Criterion]:
        log_probs, indices, missing = self.teacher
        num_stored = indices.shape[-1]
        num_tokens = indices.shape[:-1].numel()
        log_probs_NK = log_probs.reshape(num_tokens, num_stored)
        indices_NK = indices.reshape(num_tokens, num_stored).long()
        renormalize = missing == "renormalize"

        def criterion_of(chunk: Chunk) -> Criterion:
            indices_nK = indices_NK[chunk.places]
            require_distribution(log_probs_NK[chunk.places], indices_nK)
            return TopKTeacher(
                log_probs_NK[chunk.places],
                indices_nK,
                renormalize,
                self.reverse,
                self.temperature,
                complete=num_stored == columns.whole,
            )

        return criterion_of


class _Whole(NamedTuple):
    """Divergence from a teacher's head."""

    teacher: TeacherHead
    reverse: bool
    temperature: float

    narrow = False

    @staticmethod
    def operation() -> Callable[..., Any]:
        return _operation_whole

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float], word: str) -> "_Whole":
        (hidden, weight, *bias), (reverse, temperature, soft_cap) = tensors, numbers
        teacher = TeacherHead(hidden, weight, bias[0] if bias else None, soft_cap or None)
        return cls(teacher, bool(reverse), temperature)

    @property
    def others(self) -> int:
        return 1 if self.teacher.soft_cap is None else 2

    def pointers(self, counts: Tensor) -> Pointers:
        return Pointers(torch.zeros_like(counts, dtype=torch.int64), counts, "mask")

    def criteria(
        self, columns: Columns, wide: torch.dtype, chunks: list[Chunk], *, kept: bool, cut: Group
    ) -> Callable[[Chunk], Criterion]:
        hidden, weight, bias, soft_cap = self.teacher
        hidden_NH = hidden.reshape(-1, hidden.shape[-1])
        logits = HeadLogits(Head(weight, bias, soft_cap), columns, wide, chunks, kept=kept)

        def criterion_of(chunk: Chunk) -> Criterion:
            h_nH, known = chunk_of(hidden_NH, chunk, cut, wide), set()

            def logits_of(first: int, width: int) -> Tensor:
                """Computed when asked for first, and kept where they are asked for again."""
                block = slice(first - columns.first, first - columns.first + width)
                if block.start not in known:
                    if not kept:
                        known.clear()
                    known.add(block.start)
                    logits.compute(block, h_nH).div_(self.temperature)
                return logits.of(block, len(h_nH))

            return WholeTeacher(logits_of, self.reverse, self.temperature)

        return criterion_of


_operation_stored = one_operation("linear_kl_of_stored", _Stored)
_operation_whole = one_operation("linear_kl_of_whole", _Whole)
