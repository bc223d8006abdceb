"""Mamba-2's scan in Triton, forward and backward: what is launched, in which order.

Nothing is read on the host and no atomics add, so each run gives the same bits. A chunk may have
any number of tokens, and heads and states any number of features.

Dimensions: B rows, L tokens in c chunks of q, H heads in G groups, P features of a head, N
features of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megablocks_core.layers.kernels.launching import arrays, launch, parts
from megablocks_core.layers.kernels.sequences.decays import (
    Decays,
    Terms,
    crossing_of,
    decays_of,
    gradients_of_decays,
)
from megablocks_core.layers.kernels.sequences.scan_gradient_kernels import (
    groups_kernel,
    pairs_kernel,
    pass_back_kernel,
)
from megablocks_core.layers.kernels.sequences.scan_kernels import (
    mix_kernel,
    pass_kernel,
    products_kernel,
    states_kernel,
)

# Numbers of a state that one program passes on.
_PASSED = {"NUMBERS": 1024}
_COMPILED = {"num_warps": 4, "enable_fp_fusion": True}


class ScanGradients(NamedTuple):
    """Gradients in the arguments of ``scan``; ``None`` where there is no such argument."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    entries: Tensor | None
    carry: Tensor


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    entries: Tensor | None,
    document: Tensor | None,
    *,
    carry: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """``s = exp(dt A) s + dt x B^T``; ``y = s C + D x``, of every head.

    Args:
        x: [B L H P]; nothing here may be empty.
        dt: [B L H].
        A: [H].
        B: [B L G N].
        C: [B L G N].
        D: [H], [H P] or ``None``.
        entries: Added to the state behind each chunk [c B H P N], or ``None``.
        document: Each token's document, which sees no other [L], or ``None`` for one.
        carry: The state before the first token [B H P N]; default zeros.
        chunk_size: q.

    Returns:
        ``y`` [B L H P] of x's dtype, and the states before each chunk and behind the last one
        [c+1 B H P N], float32.
    """
    work = _Work(x, B, C, min(chunk_size, x.shape[1]))
    decays = decays_of(dt, A, document, work.size)
    states = work.states(x, B, decays, entries, carry)
    meets = work.products(C, B)
    y = _empty_like(x)
    work.mix(x, meets, states, C, decays, D, result=y)
    return y, states


def scan_gradients(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    entries: Tensor | None,
    document: Tensor | None,
    *,
    carry: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dstates: Tensor | None,
    chunk_size: int,
) -> ScanGradients:
    """Gradients in every argument of ``scan``, which are what must be kept for it.

    States are computed again from ``carry``, that before the first token.

    Args:
        x, dt, A, B, C, D, entries, document: Those of ``scan``.
        carry: The state before the first token [B H P N].
        dy: Gradient in y [B L H P].
        dfinal: In the state behind the last chunk [B H P N].
        dstates: In the states before every chunk [c B H P N], or ``None``.
        chunk_size: That of ``scan``.
    """
    work = _Work(x, B, C, min(chunk_size, x.shape[1]))
    decays = decays_of(dt, A, document, work.size)
    states = work.states(x, B, decays, entries, carry)
    dbehind = work.outer(dy, C, decays.enter)
    dcarry, passed = work.pass_back(dbehind, states, decays, dfinal, dstates)
    meets = work.products(C, B)
    dmeets, crossing = work.pairs(dy, x, meets, decays)
    dB, dC = _empty_like(B), _empty_like(C)
    work.groups(dC, dmeets, B, dy, decays.enter, states, reverse=False)
    work.groups(dB, dmeets, C, x, decays.leave * decays.dt, dbehind, reverse=True)
    del dmeets

    read = work.mix(x, meets, states, C, decays, None, other=dy)[0]
    dx = _empty_like(x)
    left, columns, own = work.mix(
        dy, meets, dbehind, B, decays, D, result=dx, other=x, reverse=True
    )
    terms = Terms(crossing, read, decays.dt * left, passed)
    ddt, dA = gradients_of_decays(terms, decays.dt, A, x.shape[1])
    diagonal_BGcq = meets.diagonal(dim1=-2, dim2=-1).transpose(1, 2)
    through_x = columns + own * diagonal_BGcq.repeat_interleave(work.heads_of_group, dim=1)
    ddt = ddt + through_x.flatten(2)[..., : x.shape[1]].transpose(1, 2)
    dD = None if D is None else _skip_gradient(D, own, x, dy)
    return ScanGradients(
        dx,
        ddt.to(dt.dtype),
        dA.to(A.dtype),
        dB,
        dC,
        dD,
        None if entries is None else dbehind,
        dcarry,
    )


def _skip_gradient(D: Tensor, own_BHcq: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    if D.dim() == 1:
        return own_BHcq.sum((0, 2, 3)).to(D.dtype)
    return torch.einsum("blhp,blhp->hp", x.float(), dy.float()).to(D.dtype)


class _Work:
    """The launches of one call, which share sizes and blocks."""

    def __init__(self, x: Tensor, B: Tensor, C: Tensor, size: int) -> None:
        self.rows, self.length, self.heads, self.features = x.shape
        self.groups_, self.states_ = B.shape[2:]
        self.size, self.chunks = size, parts(self.length, size)
        self.heads_of_group = self.heads // self.groups_
        # Numbers of 16 bits are tf32 numbers too; those of float32 are multiplied exactly.
        narrow = all(part.dtype.itemsize == 2 for part in (x, B, C))
        self.precision = "tf32" if narrow else "ieee"
        self.of_rows = _block(size)
        self.of_features, self.of_states = _block(self.features), _block(self.states_)
        self.new = x.new_empty

    def outer(self, a: Tensor, b: Tensor, weights: Tensor, *, more: int = 0) -> Tensor:
        """Of each chunk the sum of ``weights a b^T`` [c B H P N]; room for more chunks behind."""
        states = self._new_states(self.chunks + more)
        grid = (
            self.rows * self.chunks * self.heads,
            parts(self.features, self.of_features),
            parts(self.states_, self.of_states),
        )
        sizes = (self.length, self.size, self.chunks, self.rows, *self._numbers())
        blocks = self._blocks(ROWS=min(self.of_rows, 32))
        launch(states_kernel, grid, *arrays(states, weights, a, b), *sizes, **blocks)
        return states

    def states(
        self, x: Tensor, B: Tensor, decays: Decays, entries: Tensor | None, carry: Tensor | None
    ) -> Tensor:
        """The states before each chunk and behind the last one [c+1 B H P N]."""
        states = self.outer(x, B, decays.leave * decays.dt, more=1)
        named = {"CARRIED": carry is not None, "ENTERED": entries is not None}
        given = arrays(states, decays.passing, carry, entries)
        launch(
            pass_kernel, self._passed(), *given, *self._sequences(), **named, **_PASSED, **_COMPILED
        )
        return states

    def pass_back(
        self,
        gradients: Tensor,
        states: Tensor,
        decays: Decays,
        dfinal: Tensor,
        dstates: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The gradient in the carry, and in the logarithm of what passes each chunk [B H c].

        ``gradients`` become those in the states behind chunks.
        """
        grid = self._passed()
        shape = (self.rows, self.heads)
        inner = self.new(grid[1], *shape, self.chunks, dtype=torch.float32)
        dcarry = self.new(*shape, self.features, self.states_, dtype=torch.float32)
        named = {"FURTHER": dstates is not None}
        given = arrays(gradients, inner, dcarry, dfinal, states, dstates, decays.passing)
        launch(pass_back_kernel, grid, *given, *self._sequences(), **named, **_PASSED, **_COMPILED)
        return dcarry, inner.sum(0)

    def products(self, C: Tensor, B: Tensor) -> Tensor:
        """``C_i B_j`` of tokens of each chunk [B c G q q]."""
        meets = self._new_pairs()
        sizes = (self.length, self.size, self.chunks, self.groups_, self.states_)
        blocks = self._blocks()
        del blocks["FEATURES"]
        launch(products_kernel, self._paired(), *arrays(meets, C, B), *sizes, **blocks)
        return meets

    def pairs(self, dy: Tensor, x: Tensor, meets: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
        """Gradients of these, and in the logarithm of each decay, of tokens that meet [B H c q]."""
        dmeets = self._new_pairs()
        tiles = parts(self.size, self.of_rows)
        shape = (self.rows, self.heads, self.chunks, tiles, tiles, self.of_rows)
        rows, columns = (self.new(shape, dtype=torch.float32) for _ in range(2))
        given = arrays(dmeets, rows, columns, meets, dy, x, *decays[:3], decays.document)
        sizes = (self.length, self.size, self.chunks, self.heads, self.groups_, self.features)
        blocks = self._blocks()
        del blocks["STATES"]
        parted = decays.document is not None
        launch(pairs_kernel, self._paired(), *given, *sizes, PARTED=parted, **blocks)
        return dmeets, crossing_of(rows, columns)[..., : self.size]

    def groups(
        self,
        result: Tensor,
        dmeets: Tensor,
        other: Tensor,
        a: Tensor,
        weights: Tensor,
        states: Tensor,
        *,
        reverse: bool,
    ) -> None:
        """Write the gradient in C, or in B if in reverse."""
        grid = (
            self.rows * self.chunks * self.groups_,
            parts(self.size, self.of_rows),
            parts(self.states_, self.of_states),
        )
        sizes = (self.length, self.size, self.chunks, self.rows, *self._numbers())
        given = arrays(result, dmeets, other, a, weights, states)
        launch(groups_kernel, grid, *given, *sizes, REVERSED=reverse, **self._blocks())

    def mix(
        self,
        a: Tensor,
        meets: Tensor,
        states: Tensor,
        read: Tensor,
        decays: Decays,
        D: Tensor | None,
        *,
        result: Tensor | None = None,
        other: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write ``result`` if there is one; give inner products with ``other`` [B H c q], if any.

        They are those of what came from states, and if a result is written, of all that came and
        of ``a``.
        """
        tiles = parts(self.features, self.of_features)
        shape = (tiles, self.rows, self.heads, self.chunks, self.size)
        summed = other is not None
        outside, whole, own = (
            self.new(shape if wanted else (1,), dtype=torch.float32)
            for wanted in (summed, reverse, reverse)
        )
        weights = decays.leave if reverse else decays.enter
        given = [a, other, meets, states, read, *decays[:3], weights, decays.document, D]
        sizes = (self.length, self.size, self.chunks, self.rows, *self._numbers())
        named = {
            "REVERSED": reverse,
            "WRITTEN": result is not None,
            "SUMMED": summed,
            "PARTED": decays.document is not None,
            "SKIPPED": D is not None,
            "BY_FEATURE": D is not None and D.dim() == 2,
        }
        grid = (self.rows * self.chunks * self.heads, parts(self.size, self.of_rows), tiles)
        first = outside if result is None else result
        given = arrays(first, outside, whole, own, *given)
        launch(mix_kernel, grid, *given, *sizes, **named, **self._blocks())
        return outside.sum(0), whole.sum(0), own.sum(0)

    def _new_states(self, number: int) -> Tensor:
        shape = (number, self.rows, self.heads, self.features, self.states_)
        return self.new(shape, dtype=torch.float32)

    def _new_pairs(self) -> Tensor:
        shape = (self.rows, self.chunks, self.groups_, self.size, self.size)
        return self.new(shape, dtype=torch.float32)

    def _numbers(self) -> tuple[int, ...]:
        return self.heads, self.groups_, self.features, self.states_

    def _sequences(self) -> tuple[int, ...]:
        return self.chunks, self.rows * self.heads, self.features * self.states_

    def _passed(self) -> tuple[int, int]:
        return self.rows * self.heads, parts(self.features * self.states_, _PASSED["NUMBERS"])

    def _paired(self) -> tuple[int, int, int]:
        tiles = parts(self.size, self.of_rows)
        return self.rows * self.chunks * self.groups_, tiles, tiles

    def _blocks(self, **other: int) -> dict[str, Any]:
        return {
            "ROWS": self.of_rows,
            "FEATURES": self.of_features,
            "STATES": self.of_states,
            "PRECISION": self.precision,
            "num_stages": 2,
            **_COMPILED,
            **other,
        }


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _block(size: int) -> int:
    """A power of two that a product of matrices takes."""
    return min(max(triton.next_power_of_2(size), 16), 64)
