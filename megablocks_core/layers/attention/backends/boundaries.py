"""Where documents lie in a row: read on the host, or kept on the device.

Dimensions: T tokens, E documents.
"""

import torch
from torch import Tensor

from megablocks_core.layers.attention.spec import AttentionSpec


def pieces_of(cu_seqlens: Tensor, places: Tensor, num_tokens: int) -> list[int]:
    """Lengths of document, pads, document, pads, ..., up to the end of the row.

    Raises:
        ValueError: The boundaries are not those of documents in such a row.
    """
    sums, starts = cu_seqlens.tolist(), places.tolist()
    if len(sums) != len(starts) or sums[0] != 0 or starts[0] != 0:
        raise ValueError(
            f"cu_seqlens={sums} and cu_seqlens_padded={starts} must pair and start at 0"
        )
    pieces = []
    for index, length in enumerate(b - a for a, b in zip(sums, sums[1:], strict=False)):
        room = starts[index + 1] - starts[index]
        if not 0 <= length <= room:
            raise ValueError(
                f"cu_seqlens={sums} must not fall and its documents must fit their places {starts}"
            )
        pieces += [length, room - length]
    if starts[-1] > num_tokens:
        raise ValueError(f"cu_seqlens={starts} must end within the row of {num_tokens} tokens")
    return [*pieces, 0, num_tokens - starts[-1]]


class Boundaries:
    """Those of a spec with documents, without a read on the host where ``max_seqlen`` is given.

    On the CPU they are checked as ``pieces_of`` does; elsewhere the device checks them, and stops
    the program where they are wrong, at some later time.

    Attributes:
        cu_seqlens: Sums of lengths, int32 [E+1].
        places: Sums of lengths with pads, int32 [E+1].
        padded: Whether there may be pads between documents.
        document_T: Each token's document, the last one it may belong to.
        outside_T: Which tokens are pads, or stand behind the last document.
    """

    def __init__(self, spec: AttentionSpec, num_tokens: int) -> None:
        assert spec.cu_seqlens is not None
        self.padded = spec.cu_seqlens_padded is not None
        self.cu_seqlens = spec.cu_seqlens.int()
        self.places = self.cu_seqlens
        if spec.cu_seqlens_padded is not None:
            self.places = spec.cu_seqlens_padded.int()
        self._max_seqlen = spec.max_seqlen
        self._check(num_tokens)
        index_T = torch.arange(num_tokens, device=self.places.device, dtype=torch.int32)
        last = max(len(self.places) - 2, 0)
        found_T = torch.searchsorted(self.places, index_T, right=True) - 1
        self.document_T = found_T.clamp(max=last)
        ends = self.places[:-1] + self.lengths
        self.outside_T = (
            index_T >= ends[self.document_T] if len(ends) else torch.ones_like(index_T).bool()
        )

    @property
    def lengths(self) -> Tensor:
        """Of documents, without pads, int32 [E]."""
        return self.cu_seqlens.diff()

    def longest(self) -> int:
        """``max_seqlen``, or read from the device."""
        if self._max_seqlen is not None:
            return self._max_seqlen
        return int(self.lengths.max()) if len(self.cu_seqlens) > 1 else 0

    def _check(self, num_tokens: int) -> None:
        if self.cu_seqlens.shape != self.places.shape:
            raise ValueError(
                f"cu_seqlens [{len(self.cu_seqlens)}] and cu_seqlens_padded [{len(self.places)}] "
                "must pair"
            )
        if self.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            pieces = pieces_of(self.cu_seqlens, self.places, num_tokens)
            if self._max_seqlen is not None and max(pieces[::2]) > self._max_seqlen:
                raise ValueError(
                    f"max_seqlen={self._max_seqlen} must be at least the length of the longest "
                    f"document, {max(pieces[::2])}"
                )
            return
        right = (self.cu_seqlens[0] == 0) & (self.places[0] == 0)
        right &= (self.lengths >= 0).all() & (self.lengths <= self.places.diff()).all()
        right &= self.places[-1] <= num_tokens
        if self._max_seqlen is not None:
            right &= (self.lengths <= self._max_seqlen).all()
        told = "cu_seqlens must be sums of lengths of documents in their row"
        torch.ops.aten._assert_async.msg(right, told)


class _NoGradient(torch.autograd.Function):
    """Some tokens receive no gradient, whatever kernels leave at their places."""

    @staticmethod
    def forward(ctx, x_TND: Tensor, outside_T: Tensor) -> Tensor:
        ctx.save_for_backward(outside_T)
        return x_TND.view_as(x_TND)

    @staticmethod
    def backward(ctx, dy_TND: Tensor) -> tuple[Tensor, None]:
        return dy_TND.masked_fill(ctx.saved_tensors[0].view(-1, 1, 1), 0), None


def without_gradient(x_TND: Tensor, outside_T: Tensor) -> Tensor:
    """``x``, of which the tokens outside of documents receive no gradient."""
    return _NoGradient.apply(x_TND, outside_T)


def zero_outside(y_TNW: Tensor, outside_T: Tensor) -> Tensor:
    """``y`` with zeros for the tokens outside of documents."""
    return y_TNW.masked_fill(outside_T.view(-1, 1, 1), 0)
