"""A head and its divergence from a teacher, without the logits of either (distillation:
https://arxiv.org/abs/1503.02531, section 2).

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features (a teacher may have others), V the whole vocabulary, K stored entries of a
token; v is this rank's share of V, and b a block of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.chunked_head import (
    Criterion,
    HeadLogits,
    chunk_length,
    chunk_of,
    run_chunks,
    wide_dtype,
)
from megablocks_core.parallel.chunked_loss import (
    check_head,
    group_named,
    token_losses,
    total_loss,
)
from megablocks_core.parallel.divergence import (
    StoredTopK,
    check_options,
    check_stored,
    stored_criterion,
)
from megablocks_core.parallel.divergence_criteria import WholeTeacher
from megablocks_core.parallel.head_gradients import Gradients, Head, Wanted
from megablocks_core.parallel.token_chunks import Chunk, chunk_tokens
from megablocks_core.parallel.vocabulary import Columns, agree_on_columns


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
    cut = group if sequence_parallel else LOCAL
    tokens = _tokens(hidden, teacher, mask, cut)
    check_head(hidden, weight, bias, tokens, cut, "mask")
    check_options(direction, temperature, reduction, mask, tokens)
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    if isinstance(teacher, StoredTopK):
        check_stored(teacher, tokens, direction, temperature)
    else:
        check_head(teacher.hidden, teacher.weight, teacher.bias, tokens, cut, "mask")
        if len(teacher.weight) != len(weight):
            raise ValueError(
                f"weight of the teacher has {len(teacher.weight)} rows and must have "
                f"{len(weight)}, as the student's"
            )
    if mask is None:
        mask = torch.ones(tokens, dtype=torch.bool, device=hidden.device)
    job = _Job(
        _constant(teacher),
        mask,
        vocab_size,
        direction == "reverse",
        temperature,
        soft_cap,
        sequence_parallel,
        group,
    )
    if reduction == "none":
        return token_losses(hidden, weight, bias, job, mask)
    return total_loss(hidden, weight, bias, job, mask, mean=reduction == "mean")


def _constant(teacher: TeacherHead | StoredTopK) -> TeacherHead | StoredTopK:
    """The teacher without a graph behind it."""
    if isinstance(teacher, StoredTopK):
        return teacher._replace(log_probs=teacher.log_probs.detach())
    hidden, weight, bias, soft_cap = teacher
    bias = None if bias is None else bias.detach()
    return TeacherHead(hidden.detach(), weight.detach(), bias, soft_cap)


def _tokens(
    hidden: Tensor, teacher: TeacherHead | StoredTopK, mask: Tensor | None, cut: Group
) -> torch.Size:
    """The shape of all tokens."""
    if mask is not None:
        return mask.shape
    if isinstance(teacher, StoredTopK):
        return teacher.indices.shape[:-1]
    if cut.size > 1:
        raise ValueError(
            "mask=None must be given under sequence parallelism, where hidden does not say how "
            "many tokens there are"
        )
    return hidden.shape[:-1]


class _Job(NamedTuple):
    teacher: TeacherHead | StoredTopK
    mask: Tensor
    vocab_size: int | None
    reverse: bool
    temperature: float
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
        if isinstance(self.teacher, StoredTopK):
            (*tensors, missing), bounds = self.teacher, (self.soft_cap, None)
        else:
            (*tensors, bound), missing = self.teacher, ""
            bounds = (self.soft_cap, bound)
        losses, *gradients = _opaque(
            hidden,
            weight,
            bias,
            scale,
            list(wanted),
            [x for x in tensors if isinstance(x, Tensor)],
            self.mask,
            self.vocab_size,
            [self.temperature, *(0.0 if bound is None else bound for bound in bounds)],
            f"{'reverse' if self.reverse else 'forward'} {missing}",
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
    teacher, mask, group, wide = job.teacher, job.mask, job.group, wide_dtype(hidden, weight)
    if isinstance(teacher, StoredTopK):
        indices, counts, others = teacher.indices, mask.unsqueeze(-1), 0
    else:
        indices, counts = torch.zeros_like(mask, dtype=torch.int64), mask
        others = 1 + (teacher.soft_cap is not None)
    columns = agree_on_columns(
        weight,
        indices,
        counts,
        vocab_size=job.vocab_size,
        group=group,
        names=("weight", "indices"),
    )
    head = Head(weight, bias, job.soft_cap)
    cut = group if job.sequence_parallel else LOCAL
    chunks = chunk_tokens(mask, chunk_length(head, columns, wide, others=others), cut=cut)
    losses, (dhidden, dweight, dbias) = run_chunks(
        hidden.reshape(-1, hidden.shape[-1]),
        HeadLogits(head, columns, wide, chunks, kept=any(wanted)),
        _criterion_of(job, columns, wide, chunks, kept=any(wanted)),
        chunks,
        scale_N=scale.expand(mask.shape).reshape(-1),
        wanted=wanted,
        group=group,
        sequence_parallel=job.sequence_parallel,
    )
    dhidden = None if dhidden is None else dhidden.view(hidden.shape)
    return losses.view(mask.shape), (dhidden, dweight, dbias)


def _criterion_of(
    job: _Job, columns: Columns, wide: torch.dtype, chunks: list[Chunk], *, kept: bool
) -> Callable[[Chunk], Criterion]:
    """The divergence of a chunk's tokens."""
    teacher = job.teacher
    if isinstance(teacher, StoredTopK):
        log_probs_NK = teacher.log_probs.reshape(job.mask.numel(), teacher.log_probs.shape[-1])
        indices_NK = teacher.indices.reshape(log_probs_NK.shape)

        def stored(chunk: Chunk) -> Criterion:
            return stored_criterion(
                log_probs_NK[chunk.places],
                indices_NK[chunk.places],
                job.mask.reshape(-1, 1)[chunk.places],
                teacher.missing,
                job.reverse,
                job.temperature,
            )

        return stored
    hidden_NH = teacher.hidden.reshape(-1, teacher.hidden.shape[-1])
    logits = HeadLogits(Head(*teacher[1:]), columns, wide, chunks, kept=kept)
    cut = job.group if job.sequence_parallel else LOCAL

    def whole(chunk: Chunk) -> Criterion:
        h_nH, known = chunk_of(hidden_NH, chunk, cut, wide), set()

        def logits_of(first: int, width: int) -> Tensor:
            """Computed when asked for first, and kept where they are asked for again."""
            block = slice(first - columns.first, first - columns.first + width)
            if block.start not in known:
                known.add(block.start)
                logits.compute(block, h_nH).div_(job.temperature)
            return logits.of(block, len(h_nH))

        return WholeTeacher(logits_of, job.reverse, job.temperature)

    return whole


# For the compiler one operation, so that neither lengths nor chunks enter its graph.
@torch.library.custom_op("megablocks_core::linear_kl", mutates_args=())
def _opaque(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    wanted: list[bool],
    teacher: list[Tensor],
    mask: Tensor,
    vocab_size: int | None,
    numbers: list[float],
    words: str,
    sequence_parallel: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, soft_cap, teacher_cap = numbers
    direction, missing = words.split(" ")
    if missing:
        whose = StoredTopK(teacher[0], teacher[1], missing)
    else:
        bias_v = teacher[2] if len(teacher) > 2 else None
        whose = TeacherHead(teacher[0], teacher[1], bias_v, teacher_cap or None)
    job = _Job(
        whose,
        mask,
        vocab_size,
        direction == "reverse",
        temperature,
        soft_cap or None,
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
    _, (wants_hidden, wants_weight, wants_bias), _, mask, *_ = others
    wide = wide_dtype(hidden, weight)
    return (
        mask.new_empty(mask.shape, dtype=wide),
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if wants_weight else hidden.new_empty(0),
        torch.empty_like(bias) if wants_bias and bias is not None else hidden.new_empty(0),
    )
