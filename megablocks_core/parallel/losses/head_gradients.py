"""Gradients of a head and its hidden states, from those in its logits, a block at a time.

Dimensions: N tokens, n those of a chunk, H features, b columns of the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.groups import Group
from megablocks_core.groups.messages import (
    finish_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from megablocks_core.parallel.losses.head_products import Products, stays_narrow
from megablocks_core.parallel.losses.token_chunks import Chunk

# Elements of a weight's gradient in one allocation, where it is rounded at the end: each goes
# back to the system as soon as its part is rounded.
_PIECE = 1 << 24


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


def gradient_dtype(x: Tensor, wide: torch.dtype) -> torch.dtype:
    """In what the summed gradient of a weight or bias is handed on: its own dtype.

    But what float16 cannot hold as a sum it may hold as a mean, so there rounding waits.
    """
    return wide if x.dtype == torch.float16 else x.dtype


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed up from those in logits.

    A chunk's gradient of hidden states is summed over the ranks while the next chunk is
    computed.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        head: Head,
        blocks: list[slice],
        wanted: Wanted,
        *,
        products: Products,
        group: Group,
        cut: Group,
        wide: torch.dtype,
        once: bool,
    ) -> None:
        self.weight, self.bias, _ = head
        self.products, self.group, self.cut, self.wide = products, group, cut, wide
        self.hidden = hidden_NH.new_zeros(hidden_NH.shape) if wanted.hidden else None
        # One product of narrow factors is rounded once: where no other is added, that is the sum.
        narrow = once and stays_narrow(hidden_NH) and self.weight.dtype == hidden_NH.dtype
        sums = gradient_dtype(self.weight, wide) if narrow else wide
        self.dweight = RowSums(self.weight, blocks, products, sums) if wanted.weight else None
        self.dbias = None
        if wanted.bias and self.bias is not None:
            self.dbias = self.bias.new_zeros(self.bias.shape, dtype=self.wide)
        self.flying: tuple[Chunk, Tensor] | None = None

    def begin(self, chunk: Chunk, h_nH: Tensor) -> None:
        """Start with a chunk."""
        self.chunk, self.h_nH = chunk, h_nH
        if self.hidden is not None:
            self.dh_nH = h_nH.new_zeros(h_nH.shape, dtype=self.wide)

    def add(self, block: slice, dx_nb: Tensor) -> None:
        """Add what the gradient in a block of the chunk's logits makes."""
        if self.dbias is not None:
            self.dbias[block] += dx_nb.sum(0)
        factor_bn = self.products.factor("gradient", dx_nb.t(), self.h_nH.dtype)
        if self.hidden is not None:
            rows_bH = self.products.factor("rows", self.weight[block], self.h_nH.dtype)
            self.products.add(self.dh_nH, factor_bn.t(), rows_bH)
        if self.dweight is not None:
            self.dweight.add(block, factor_bn, self.h_nH)

    def end(self) -> None:
        """All blocks of the chunk have been added."""
        if self.dweight is not None:
            self.dweight.is_empty = False
        self._land()
        if self.hidden is None:
            return
        flying = self.dh_nH
        if self.cut.size > 1:
            sizes = self.chunk.sizes
            flying = start_reduce_scatter(flying, dim=0, group=self.cut, sizes=sizes)
        elif self.group.size > 1:
            flying = start_all_reduce(flying, group=self.group)
        self.flying = self.chunk, flying

    def finish(self) -> Gradients:
        """All chunks have been added: the gradients, in the dtypes of ``gradient_dtype``."""
        self._land()
        dweight = None if self.dweight is None else self.dweight.rounded()
        dbias = self.dbias
        if dbias is not None and self.bias is not None:
            dbias = dbias.to(gradient_dtype(self.bias, self.wide))
        return self.hidden, dweight, dbias

    def _land(self) -> None:
        if self.hidden is None or self.flying is None:
            return
        (chunk, dh_nH), self.flying = self.flying, None
        if self.cut.size > 1:
            sizes = chunk.sizes
            dh_nH = finish_reduce_scatter(dh_nH, dim=0, group=self.cut, sizes=sizes)
        elif self.group.size > 1:
            dh_nH = wait(dh_nH)
        self.hidden[chunk.own] = dh_nH.to(self.hidden.dtype)


class RowSums:
    """The gradient of a weight, block by block, summed in at least float32."""

    def __init__(
        self, weight: Tensor, blocks: list[slice], products: Products, wide: torch.dtype
    ) -> None:
        self.weight, self.products = weight, products
        width, own, features = max(blocks[0].stop, 1), blocks[-1].stop, weight.shape[1]
        self.step = max(1, _PIECE // max(width * features, 1)) * width
        self.dtype = gradient_dtype(weight, wide)
        if self.dtype == wide:
            self.step = max(len(weight), 1)
            own = len(weight)
        starts = range(0, max(own, 1), self.step)
        lengths = [min(self.step, own - start) for start in starts]
        self.pieces = [weight.new_empty(length, features, dtype=wide) for length in lengths]
        self.pieces[-1][blocks[-1].stop - starts[-1] :] = 0.0  # padding
        # The first product of each block is put where later ones are added: nothing is zeroed.
        self.is_empty = True

    def add(self, block: slice, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the rows of a block."""
        start = block.start % self.step
        piece = self.pieces[block.start // self.step]
        rows = piece[start : start + block.stop - block.start]
        self.products.add(rows, a, b, fresh=self.is_empty)

    def rounded(self) -> Tensor:
        """The whole sum, rounded once; zeros in rows of no block."""
        if self.is_empty:
            return self.weight.new_zeros(self.weight.shape, dtype=self.dtype)
        if self.pieces[0].dtype == self.dtype:
            return self.pieces.pop()
        result, start = self.weight.new_empty(self.weight.shape), 0
        while self.pieces:
            piece = self.pieces.pop(0)
            result[start : start + len(piece)] = piece
            start += len(piece)
        result[start:] = 0.0
        return result
