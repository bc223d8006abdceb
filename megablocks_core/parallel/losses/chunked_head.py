"""Losses of a head's logits, a chunk of tokens at a time: the whole logits never exist.

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features; c is this rank's columns of the vocabulary and b those of a block. P parts
of the vocabulary, each with k numbers a token: blocks of this rank, or ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.messages import finish_all_gather, start_all_gather
from megablocks_core.parallel.losses.head_gradients import Gradients, Head, HeadGradients, Wanted
from megablocks_core.parallel.losses.head_products import Products, stays_narrow
from megablocks_core.parallel.losses.token_chunks import Chunk
from megablocks_core.parallel.tensor.vocabulary import Columns

# On CPU: logits of a chunk, and of a block that the cache holds. Products with more tokens, or
# with more columns at a time, run no faster there.
_CHUNK, _MOST_TOKENS = 1 << 25, 1024
_BLOCK, _FEWEST_COLUMNS = 1 << 19, 2048
# On other devices: logits of a chunk, all columns of it at once.
_CHUNK_OF_DEVICE = 1 << 27


class Criterion(Protocol):
    """A loss of a chunk's tokens, from numbers that add up over parts of the vocabulary."""

    def partial_(self, x_nb: Tensor, first: int) -> Tensor:
        """The numbers [k n] of columns ``first``, ``first + 1``, ... of the vocabulary.

        The logits become what ``prepare_`` makes of them.
        """
        ...

    def prepare_(self, x_nb: Tensor, first: int, top_n: Tensor) -> None:
        """Make of logits, whose numbers begin with ``top_n``, what ``differentiate_`` takes."""
        ...

    def merge(self, parts_Pkn: Tensor) -> Tensor:
        """The numbers [k n] of all parts together."""
        ...

    def losses(self, sums_kn: Tensor) -> Tensor:
        """Each token's loss, from the numbers of the whole vocabulary."""
        ...

    def differentiate_(
        self, x_nb: Tensor, first: int, part_kn: Tensor, sums_kn: Tensor, scale_n: Tensor
    ) -> None:
        """The gradient of ``scale_n`` times the losses in the logits, in their place."""
        ...


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """In what losses are computed: float64 if a tensor is, else float32."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def keeps_logits(hidden: Tensor) -> bool:
    """Whether a chunk's logits are held until their gradient is computed.

    Where a CPU multiplies 16-bit factors, computing them again takes less time, and no memory.
    """
    return hidden.device.type != "cpu" or not stays_narrow(hidden)


def logits_dtype(head: Head, hidden: Tensor, wide: torch.dtype) -> torch.dtype:
    """The narrowest dtype that logits have after their last rounding.

    A CPU's products of 16-bit factors are rounded to 16 bits; nothing must be made of them then.
    """
    bare = head.bias is None and head.soft_cap is None
    narrow = bare and wide == torch.float32 and not keeps_logits(hidden)
    return hidden.dtype if narrow else wide


def chunk_length(
    head: Head, columns: Columns, wide: torch.dtype, *, kept: bool, others: int = 0
) -> int:
    """How many tokens to work on at a time.

    Less where their logits are kept and other things beside them take memory: slopes of bounded
    ones, the wide sum of a narrow weight's gradient, and those ``others`` that the caller knows
    of.
    """
    things = 1 + others + (head.soft_cap is not None)
    size = max(columns.widest * things, 1)
    if head.weight.device.type != "cpu":
        return max(1, _CHUNK_OF_DEVICE // size)
    if not kept:
        return _MOST_TOKENS
    room = _CHUNK if head.weight.dtype == wide else _CHUNK - _CHUNK // 4
    return min(_MOST_TOKENS, max(1, room // size))


class HeadLogits:
    """The logits of a head for one chunk after another, in memory that is used again.

    A chunk's are all there until the next one's come if ``kept``, else one block's alone. Those
    of a column lie side by side: products that make them, and take them, are fastest so. Their
    ``dtype`` is ``wide`` without one.
    """

    def __init__(
        self,
        head: Head,
        columns: Columns,
        wide: torch.dtype,
        chunks: Sequence[Chunk],
        *,
        kept: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.head, self.first, self.wide, self.kept = head, columns.first, wide, kept
        width, device = columns.own, head.weight.device
        longest = max((len(chunk.places) for chunk in chunks), default=0)
        step = max(_FEWEST_COLUMNS, _BLOCK // max(longest, 1))
        if device.type != "cpu":
            step = max(width, 1)
        self.blocks = [slice(at, min(at + step, width)) for at in range(0, max(width, 1), step)]
        self._logits = torch.empty(
            (width if kept else min(step, width)) * longest, dtype=dtype or wide, device=device
        )
        self._slopes = None if head.soft_cap is None else torch.empty_like(self._logits)
        self.products = Products()

    def compute(self, block: slice, h_nH: Tensor) -> Tensor:
        """The logits [n b] of a block of columns."""
        weight, bias, soft_cap = self.head
        x_nb = self.of(block, len(h_nH))
        rows_bH = self.products.factor("rows", weight[block], h_nH.dtype)
        self.products.put(x_nb.t(), rows_bH, h_nH.t())
        if bias is not None:
            x_nb.add_(bias[block])
        if soft_cap is not None:
            x_nb.div_(soft_cap).tanh_()
            torch.square(x_nb, out=self._slope_of(block, len(h_nH))).neg_().add_(1.0)
            x_nb.mul_(soft_cap)
        return x_nb

    def of(self, block: slice, num_tokens: int) -> Tensor:
        """What is in the place of a block's logits [n b]."""
        return self._place(self._logits, block, num_tokens)

    def undo_bound_(self, dx_nb: Tensor, block: slice) -> None:
        """Make the gradient in a block's bounded logits that in the unbounded ones."""
        if self._slopes is not None:
            dx_nb.mul_(self._slope_of(block, len(dx_nb)))

    def _slope_of(self, block: slice, num_tokens: int) -> Tensor:
        assert self._slopes is not None
        return self._place(self._slopes, block, num_tokens)

    def _place(self, room: Tensor, block: slice, num_tokens: int) -> Tensor:
        start, width = block.start if self.kept else 0, block.stop - block.start
        return room[start * num_tokens :][: width * num_tokens].view(width, num_tokens).t()


def run_chunks(
    hidden_NH: Tensor,
    logits: HeadLogits,
    criterion_of: Callable[[Chunk], Criterion],
    chunks: Sequence[Chunk],
    *,
    scale_N: Tensor,
    wanted: Wanted,
    group: Group,
    sequence_parallel: bool,
) -> tuple[Tensor, Gradients]:
    """Losses [N] of all tokens, and the gradients of their sum weighted by ``scale_N``.

    A gradient comes in the dtype of what it is of, rounded once; that of hidden states a chunk
    at a time, the others when all chunks are done.
    """
    head, cut = logits.head, group if sequence_parallel else LOCAL
    losses_N = torch.zeros_like(scale_N, dtype=logits.wide)
    sums = HeadGradients(
        hidden_NH,
        head,
        logits.blocks,
        wanted,
        products=logits.products,
        group=group,
        cut=cut,
        wide=logits.wide,
        once=len(chunks) == 1,
    )
    for chunk, h_nH in _hidden_chunks(hidden_NH, chunks, cut, logits.wide):
        criterion, scale_n = criterion_of(chunk), scale_N[chunk.places].to(logits.wide)
        parts = [
            criterion.partial_(logits.compute(block, h_nH), logits.first + block.start)
            for block in logits.blocks
        ]
        sums_kn = criterion.merge(torch.stack(parts))
        if group.size > 1:
            sums_kn = criterion.merge(from_all_ranks(sums_kn, group))
        losses_N[chunk.places] = criterion.losses(sums_kn).to(logits.wide)
        if not any(wanted):
            continue
        sums.begin(chunk, h_nH)
        for block, part_kn in zip(logits.blocks, parts, strict=True):
            first = logits.first + block.start
            if not logits.kept:
                criterion.prepare_(logits.compute(block, h_nH), first, part_kn[0])
            dx_nb = logits.of(block, len(h_nH))
            criterion.differentiate_(dx_nb, first, part_kn, sums_kn, scale_n)
            logits.undo_bound_(dx_nb, block)
            sums.add(block, dx_nb)
        sums.end()
    return losses_N, sums.finish()


def _hidden_chunks(
    hidden_NH: Tensor, chunks: Sequence[Chunk], cut: Group, wide: torch.dtype
) -> Iterator[tuple[Chunk, Tensor]]:
    """Each chunk's hidden states [n H]; the next ones are on their way meanwhile."""
    following = _start_hidden(hidden_NH, chunks[0], cut) if chunks else None
    for index, chunk in enumerate(chunks):
        assert following is not None
        h_nH = _finish_hidden(following, chunk, cut, wide)
        more = index + 1 < len(chunks)
        following = _start_hidden(hidden_NH, chunks[index + 1], cut) if more else None
        yield chunk, h_nH


def chunk_of(hidden_NH: Tensor, chunk: Chunk, cut: Group, wide: torch.dtype) -> Tensor:
    """Hidden states of a chunk [n H], gathered where the tokens are cut."""
    return _finish_hidden(_start_hidden(hidden_NH, chunk, cut), chunk, cut, wide)


def _start_hidden(hidden_NH: Tensor, chunk: Chunk, cut: Group) -> Tensor:
    own_nH = hidden_NH[chunk.own]
    if cut.size == 1:
        return own_nH
    return start_all_gather(own_nH, dim=0, group=cut, sizes=chunk.sizes)


def _finish_hidden(flying: Tensor, chunk: Chunk, cut: Group, wide: torch.dtype) -> Tensor:
    h_nH = flying if cut.size == 1 else finish_all_gather(flying, dim=0, sizes=chunk.sizes)
    return h_nH if stays_narrow(h_nH) else h_nH.to(wide)


def from_all_ranks(sums_kn: Tensor, group: Group) -> Tensor:
    """Every rank's numbers [size k n]; one message."""
    sizes = [1] * group.size
    flying = start_all_gather(sums_kn.unsqueeze(0), dim=0, group=group, sizes=sizes)
    return finish_all_gather(flying, dim=0, sizes=sizes)


def merge_exponentials(top_Pn: Tensor, *sums_Pn: Tensor) -> list[Tensor]:
    """The largest logit of each token, and sums whose terms hold ``exp(x - top)``."""
    top_n = top_Pn.amax(0)
    weights_Pn = (top_Pn - top_n).exp_()
    return [top_n, *((x_Pn * weights_Pn).sum(0) for x_Pn in sums_Pn)]


def maxima(x_nb: Tensor) -> Tensor:
    """The largest logit of each token; the lowest number there is where none is above it."""
    lowest = torch.finfo(x_nb.dtype).min
    if x_nb.shape[-1] == 0:
        return x_nb.new_full(x_nb.shape[:-1], lowest)
    return x_nb.amax(-1).clamp_(min=lowest)
