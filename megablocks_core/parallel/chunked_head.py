"""Losses of a head's logits, a chunk of tokens at a time: the whole logits never exist.

Dimensions: T tokens (any number of dimensions), N all tokens in one dimension, n those of a
chunk, H features; c is this rank's columns of the vocabulary and b those of a block. P parts
of the vocabulary, each with k numbers a token: blocks of this rank, or ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group

from megablocks_core.groups import LOCAL, Group
from megablocks_core.groups.collectives import (
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from megablocks_core.parallel.token_chunks import Chunk
from megablocks_core.parallel.vocabulary import Columns

# Logits of a chunk, and of a block that a CPU's cache holds. Longer chunks gain nothing there,
# since products with a hundred tokens run as fast as with a thousand.
_CHUNK, _BLOCK = 12 << 20, 1 << 18
_MOST_TOKENS, _FEWEST_COLUMNS = 1024, 512
_CHUNK_OF_DEVICE = 1 << 27


class Criterion(Protocol):
    """A loss of a chunk's tokens, from numbers that add up over parts of the vocabulary."""

    def partial(self, x_nb: Tensor, first: int) -> Tensor:
        """The numbers [k n] of columns ``first``, ``first + 1``, ... of the vocabulary."""
        ...

    def merge(self, parts_Pkn: Tensor) -> Tensor:
        """The numbers [k n] of all parts together."""
        ...

    def losses(self, sums_kn: Tensor) -> Tensor:
        """Each token's loss, from the numbers of the whole vocabulary."""
        ...

    def differentiate_(self, x_nb: Tensor, first: int, sums_kn: Tensor, scale_n: Tensor) -> None:
        """Replace logits by the gradient of ``scale_n`` times the losses in them."""
        ...


class Head(NamedTuple):
    """A linear map to logits, and the tanh that bounds them."""

    weight: Tensor
    bias: Tensor | None
    soft_cap: float | None


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Job(Protocol):
    """All that a loss takes beside the tensors that may have gradients."""

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor, Gradients]:
        """Losses [T], and the gradients of their sum or of ``scale`` times them."""
        ...


def wanted(*tensors: Tensor | None) -> Wanted:
    """Which of hidden, weight and bias need a gradient."""
    enabled = torch.is_grad_enabled()
    return Wanted(*(enabled and x is not None and x.requires_grad for x in tensors))


def total_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
    """The sum of the losses; gradients are computed along with them."""
    return _Total.apply(hidden, weight, bias, job, wanted(hidden, weight, bias))


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
    """The losses [T]; backward computes the logits again."""
    return _PerToken.apply(hidden, weight, bias, job)


def group_named(name: str) -> Group:
    """The group whose process group torch's functional collectives know by ``name``."""
    return Group.of(resolve_process_group(name)) if name else LOCAL


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """In what losses are computed: float64 if a tensor is, else float32."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def chunk_length(columns: Columns, device: torch.device, buffers: int = 1) -> int:
    """How many tokens to work on at a time."""
    if device.type != "cpu":
        return max(1, _CHUNK_OF_DEVICE // max(columns.widest * buffers, 1))
    return min(_MOST_TOKENS, max(1, _CHUNK // max(columns.widest * buffers, 1)))


class HeadChunks:
    """The logits of one head, for one chunk after another, in memory that is used again."""

    def __init__(
        self, head: Head, columns: Columns, wide: torch.dtype, chunks: Sequence[Chunk]
    ) -> None:
        self.head, self.first, self.wide = head, columns.first, wide
        width, device = columns.own, head.weight.device
        longest = max((len(chunk.places) for chunk in chunks), default=0)
        step = width if device.type != "cpu" else max(_FEWEST_COLUMNS, _BLOCK // max(longest, 1))
        starts = range(0, width, max(step, 1)) if width else (0,)
        self.blocks = [slice(start, min(start + step, width)) for start in starts]
        self.room = torch.empty(width * longest, dtype=wide, device=device)

    def logits(self, h_nH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of columns and their logits [n b]."""
        weight, bias, soft_cap = self.head
        for block in self.blocks:
            x_nb = self.of(block, len(h_nH))
            _product(h_nH, weight[block].t(), out=x_nb)
            if bias is not None:
                x_nb.add_(bias[block])
            if soft_cap is not None:
                x_nb.div_(soft_cap).tanh_().mul_(soft_cap)
            yield block, x_nb

    def of(self, block: slice, num_tokens: int) -> Tensor:
        """Where the logits of a block are."""
        width = block.stop - block.start
        start = block.start * num_tokens
        return self.room[start : start + width * num_tokens].view(num_tokens, width)

    def slope(self, x_nb: Tensor) -> Tensor | None:
        """The derivative of the bounded logits in the unbounded ones."""
        soft_cap = self.head.soft_cap
        if soft_cap is None:
            return None
        return (x_nb / soft_cap).square_().neg_().add_(1.0)


def run_chunks(
    hidden_NH: Tensor,
    logits: HeadChunks,
    criterion_of: Callable[[Chunk], Criterion],
    chunks: Sequence[Chunk],
    *,
    scale_T: Tensor,
    wanted: Wanted,
    group: Group,
    sequence_parallel: bool,
) -> tuple[Tensor, Gradients]:
    """Losses of all tokens, and the gradients of their sum weighted by ``scale_T``.

    Gradients of hidden states come in their dtype, the others in that of the losses.
    """
    weight, bias, _ = logits.head
    losses_N = hidden_NH.new_zeros(scale_T.numel(), dtype=logits.wide)
    dhidden_NH = torch.zeros_like(hidden_NH) if wanted.hidden else None
    dweight = torch.zeros_like(weight, dtype=logits.wide) if wanted.weight else None
    dbias = torch.zeros_like(bias, dtype=logits.wide) if bias is not None and wanted.bias else None
    cut = group if sequence_parallel else LOCAL
    landing = _Landing(dhidden_NH, group, sequence_parallel)
    for chunk, h_nH in _hidden_chunks(hidden_NH, chunks, cut, logits.wide):
        criterion = criterion_of(chunk)
        parts = [criterion.partial(x, logits.first + at.start) for at, x in logits.logits(h_nH)]
        sums_kn = criterion.merge(torch.stack(parts))
        if group.size > 1:
            sums_kn = criterion.merge(_from_all_ranks(sums_kn, group))
        losses_N[chunk.places] = criterion.losses(sums_kn).to(logits.wide)
        if not any(wanted):
            continue
        scale_n = scale_T.reshape(-1)[chunk.places]
        dh_nH = torch.zeros_like(h_nH, dtype=logits.wide) if wanted.hidden else None
        for block in logits.blocks:
            x_nb = logits.of(block, len(h_nH))
            slope_nb = logits.slope(x_nb)
            criterion.differentiate_(x_nb, logits.first + block.start, sums_kn, scale_n)
            if slope_nb is not None:
                x_nb.mul_(slope_nb)
            if dh_nH is not None:
                _add_product(dh_nH, x_nb, weight[block])
            if dweight is not None:
                _add_product(dweight[block], x_nb.t(), h_nH)
            if dbias is not None:
                dbias[block] += x_nb.sum(0)
        if dh_nH is not None:
            landing.start(chunk, dh_nH)
    landing.finish()
    return losses_N.view(scale_T.shape), (dhidden_NH, dweight, dbias)


def _hidden_chunks(
    hidden_NH: Tensor, chunks: Sequence[Chunk], cut: Group, wide: torch.dtype
) -> Iterator[tuple[Chunk, Tensor]]:
    """Each chunk's hidden states [n H]; the next ones are on their way meanwhile."""

    def start(chunk: Chunk) -> Tensor:
        own = hidden_NH[chunk.own]
        if cut.size == 1:
            return own
        return start_all_gather(own, dim=0, group=cut, sizes=chunk.sizes)

    following = start(chunks[0]) if chunks else None
    for index, chunk in enumerate(chunks):
        assert following is not None
        h_nH = following
        if cut.size > 1:
            h_nH = finish_all_gather(h_nH, dim=0, sizes=chunk.sizes)
        following = start(chunks[index + 1]) if index + 1 < len(chunks) else None
        yield chunk, h_nH if _stays_narrow(h_nH) else h_nH.to(wide)


class _Landing:
    """Sums gradients of hidden states over the ranks while the next chunk is computed."""

    def __init__(self, target_NH: Tensor | None, group: Group, sequence_parallel: bool) -> None:
        self.target_NH, self.group, self.scatters = target_NH, group, sequence_parallel
        self.flying: tuple[Chunk, Tensor] | None = None

    def start(self, chunk: Chunk, dh_nH: Tensor) -> None:
        self.finish()
        if self.group.size > 1 and self.scatters:
            dh_nH = start_reduce_scatter(dh_nH, dim=0, group=self.group, sizes=chunk.sizes)
        elif self.group.size > 1:
            dh_nH = start_all_reduce(dh_nH, group=self.group)
        self.flying = chunk, dh_nH

    def finish(self) -> None:
        if self.target_NH is None or self.flying is None:
            return
        chunk, dh_nH = self.flying
        if self.group.size > 1 and self.scatters:
            sizes = chunk.sizes
            dh_nH = finish_reduce_scatter(dh_nH, dim=0, group=self.group, sizes=sizes)
        elif self.group.size > 1:
            dh_nH = wait(dh_nH)
        self.target_NH[chunk.own] = dh_nH.to(self.target_NH.dtype)
        self.flying = None


def _from_all_ranks(sums_kn: Tensor, group: Group) -> Tensor:
    sizes = [1] * group.size
    flying = start_all_gather(sums_kn.unsqueeze(0), dim=0, group=group, sizes=sizes)
    return finish_all_gather(flying, dim=0, sizes=sizes)


def merge_exponentials(top_Pn: Tensor, *sums_Pn: Tensor) -> list[Tensor]:
    """The largest logit of each token, and sums whose terms hold ``exp(x - top)``."""
    top_n = top_Pn.amax(0)
    weights_Pn = (top_Pn - top_n).exp_()
    return [top_n, *((x_Pn * weights_Pn).sum(0) for x_Pn in sums_Pn)]


def maxima(x_nb: Tensor) -> Tensor:
    """The largest logit of each token; of no columns the lowest number there is."""
    if x_nb.shape[-1] == 0:
        return x_nb.new_full(x_nb.shape[:-1], torch.finfo(x_nb.dtype).min)
    return x_nb.amax(-1)


def exponentials(x_nb: Tensor, top_n: Tensor) -> Tensor:
    """``exp(x - top)``, in new memory."""
    return torch.sub(x_nb, top_n.unsqueeze(-1)).exp_()


def _stays_narrow(x: Tensor) -> bool:
    """Whether products take factors of 16 bits as they are, and still add up in float32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    if _stays_narrow(a):
        out.copy_(torch.mm(a, b.to(a.dtype), out_dtype=out.dtype))
    else:
        torch.mm(a, b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if _stays_narrow(b):
        total.add_(torch.mm(a.to(b.dtype), b, out_dtype=total.dtype))
    else:
        total.addmm_(a, b.to(total.dtype))


class _Total(torch.autograd.Function):
    """The sum of losses. Its first backward hands out the gradients that forward computed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, wanted: Wanted
    ) -> Tensor:
        losses_T, gradients = job.run(hidden, weight, bias, None, wanted)
        ctx.job, ctx.wanted, ctx.gradients = job, wanted, gradients
        ctx.save_for_backward(hidden, weight, bias)
        return losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        # They are scaled in place and then the caller's: a backward after that starts anew.
        gradients, ctx.gradients = ctx.gradients, None
        hidden, weight, bias = ctx.saved_tensors
        if gradients is None:
            _, gradients = ctx.job.run(hidden, weight, bias, None, ctx.wanted)
        dhidden, dweight, dbias = gradients
        if dhidden is not None:
            dhidden.mul_(dtotal)
        dweight, dbias = _scaled(dweight, dtotal, weight), _scaled(dbias, dtotal, bias)
        return dhidden, dweight, dbias, None, None


class _PerToken(torch.autograd.Function):
    """Each token's loss; nothing but the inputs is saved."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job
    ) -> Tensor:
        losses_T, _ = job.run(hidden, weight, bias, None, Wanted(False, False, False))
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias)
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:3])
        _, gradients = ctx.job.run(hidden, weight, bias, dlosses_T, wanted)
        dhidden, dweight, dbias = gradients
        one = dlosses_T.new_ones(())
        return dhidden, _scaled(dweight, one, weight), _scaled(dbias, one, bias), None


def _scaled(gradient: Tensor | None, scale: Tensor, like: Tensor | None) -> Tensor | None:
    """``gradient`` times ``scale`` in the dtype of ``like``; in place if that is its own."""
    if gradient is None or like is None:
        return None
    if gradient.dtype == like.dtype:
        return gradient.mul_(scale)
    result = torch.empty_like(like)
    for part, source in zip(result.split(4096), gradient.split(4096), strict=True):
        part.copy_(source * scale)
    return result
