"""A loss of a head's logits, whatever its formula is, over the ranks that share the vocabulary.

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, H features, V
the whole vocabulary; v is this rank's share of V.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel.losses.chunked_head import (
    Criterion,
    HeadLogits,
    chunk_length,
    keeps_logits,
    logits_dtype,
    run_chunks,
    wide_dtype,
)
from megablocks_core.parallel.losses.head_gradients import Gradients, Head, Wanted, gradient_dtype
from megablocks_core.parallel.losses.token_chunks import Chunk, chunk_tokens
from megablocks_core.parallel.tensor.vocabulary import Columns, agree_on_columns


class Pointers(NamedTuple):
    """Indices into the whole vocabulary, equal on every rank.

    Attributes:
        indices: [T] or [T K].
        counts: Which of them count; broadcast to ``indices``.
        name: What the caller calls them.
    """

    indices: Tensor
    counts: Tensor
    name: str


class Formula(Protocol):
    """A loss of tokens."""

    @staticmethod
    def operation() -> Callable[..., Any]:
        """What ``one_operation`` made for this kind of formula."""
        ...

    @classmethod
    def of(cls, tensors: Sequence[Tensor], numbers: Sequence[float], word: str) -> Self:
        """The formula that takes these; none of them has a gradient."""
        ...

    @property
    def others(self) -> int:
        """How many things as large as a chunk's logits it takes beside them."""
        ...

    @property
    def narrow(self) -> bool:
        """Whether its criteria take bfloat16 logits on CPU."""
        ...

    def pointers(self, counts: Tensor) -> Pointers:
        """Its indices into the vocabulary; ``counts`` says which tokens count."""
        ...

    def criteria(
        self, columns: Columns, wide: torch.dtype, chunks: list[Chunk], *, kept: bool, cut: Group
    ) -> Callable[[Chunk], Criterion]:
        """The loss of each chunk's tokens."""
        ...


class HeadLoss(NamedTuple):
    """A formula, all that it takes beside logits, and where it is computed.

    Attributes:
        kind: The formula of the logits, bounded or not.
        tensors: Which tokens count [T], equal on every rank, and those that the formula takes.
        numbers: That it takes.
        word: That it takes.
        vocab_size: V, where it is known.
        soft_cap: A bound of the logits' magnitude.
        sequence_parallel: Whether hidden states are cut over the ranks.
        group: The ranks that share the vocabulary.
    """

    kind: type[Formula]
    tensors: Sequence[Tensor]
    numbers: Sequence[float]
    word: str
    vocab_size: int | None
    soft_cap: float | None
    sequence_parallel: bool
    group: Group

    def of(self, tensors: Sequence[Tensor]) -> "HeadLoss":
        """The same loss with other tensors in the place of its own."""
        return self._replace(tensors=tensors)

    def run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Gradients]:
        """Losses [T], and the gradients of their sum weighted by ``scale`` [T].

        That of hidden states is in their dtype, others in those of ``gradient_dtype``.
        """
        if not torch.compiler.is_compiling():
            return self._run(hidden, weight, bias, scale, wanted)
        losses, *gradients = self.kind.operation()(
            hidden,
            weight,
            bias,
            scale,
            list(wanted),
            list(self.tensors),
            list(self.numbers),
            self.word,
            self.vocab_size,
            self.soft_cap,
            self.sequence_parallel,
            self.group.name,
        )
        dhidden, dweight, dbias = (
            gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)
        )
        return losses, (dhidden, dweight, dbias)

    def _run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, wanted: Wanted
    ) -> tuple[Tensor, Gradients]:
        (counts, *tensors), group = self.tensors, self.group
        formula, wide = self.kind.of(tensors, self.numbers, self.word), wide_dtype(hidden, weight)
        indices, counting, name = formula.pointers(counts)
        columns = agree_on_columns(
            weight,
            indices,
            counting,
            vocab_size=self.vocab_size,
            group=group,
            names=("weight", name),
            work=self._work(hidden, bias, wide, wanted),
        )
        head = Head(weight, bias, self.soft_cap)
        cut = group if self.sequence_parallel else LOCAL
        kept = any(wanted) and keeps_logits(hidden)
        length = chunk_length(head, columns, wide, kept=kept, others=formula.others)
        dtype = logits_dtype(head, hidden, wide) if formula.narrow else wide
        chunks = chunk_tokens(counts, length, cut=cut)
        losses, (dhidden, dweight, dbias) = run_chunks(
            hidden.reshape(-1, hidden.shape[-1]),
            HeadLogits(head, columns, wide, chunks, kept=kept, dtype=dtype),
            formula.criteria(columns, wide, chunks, kept=kept, cut=cut),
            chunks,
            scale_N=scale.expand(counts.shape).reshape(-1),
            wanted=wanted,
            group=group,
            sequence_parallel=self.sequence_parallel,
        )
        dhidden = None if dhidden is None else dhidden.view(hidden.shape)
        return losses.view(counts.shape), (dhidden, dweight, dbias)

    def _work(self, hidden: Tensor, bias: Tensor | None, wide: torch.dtype, wanted: Wanted) -> str:
        """What decides on the messages, and must be alike on every rank."""
        return (
            f"{self.kind.__name__} {self.word} of {list(self.numbers)}, vocab_size="
            f"{self.vocab_size}, soft_cap={self.soft_cap}, sequence_parallel="
            f"{self.sequence_parallel}, tokens {list(self.tensors[0].shape)}, hidden of "
            f"{hidden.shape[-1]} features, {wide} inside, "
            f"{'a' if bias is not None else 'no'} bias, "
            f"{'a' if wanted.hidden else 'no'} gradient of hidden"
        )


def one_operation(name: str, kind: type[Formula]) -> Callable[..., Any]:
    """Any loss of this kind as one operation for the compiler.

    So neither lengths nor chunks enter its graph.
    """

    @torch.library.custom_op(f"megablocks_core::{name}", mutates_args=())
    def operation(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        wanted: list[bool],
        tensors: list[Tensor],
        numbers: list[float],
        word: str,
        vocab_size: int | None,
        soft_cap: float | None,
        sequence_parallel: bool,
        group_name: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss = HeadLoss(
            kind,
            tensors,
            numbers,
            word,
            vocab_size,
            soft_cap,
            sequence_parallel,
            Group.named(group_name),
        )
        losses, gradients = loss.run(hidden, weight, bias, scale, Wanted(*wanted))
        dhidden, dweight, dbias = (
            hidden.new_empty(0) if gradient is None else gradient for gradient in gradients
        )
        return losses, dhidden, dweight, dbias

    @operation.register_fake
    def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others) -> tuple[Tensor, ...]:
        _, wanted, (counts, *_), *_ = others
        wide = wide_dtype(hidden, weight)
        gradients = []
        for x, needed in zip((hidden, weight, bias), wanted, strict=True):
            if x is None or not needed:
                gradients.append(hidden.new_empty(0))
            else:
                dtype = x.dtype if x is hidden else gradient_dtype(x, wide)
                gradients.append(x.new_empty(x.shape, dtype=dtype))
        return counts.new_empty(counts.shape, dtype=wide), *gradients

    return operation
