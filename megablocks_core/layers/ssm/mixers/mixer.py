"""What all mixers have in common: the way of a sequence, and of one token, through them.

Dimensions: B rows, T tokens, H hidden size, I inner features, C channels of the convolution. A
lowercase letter is this rank's share of the capital one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megablocks_core.groups import Group
from megablocks_core.layers.ssm.functions.steps import causal_conv1d_step
from megablocks_core.layers.ssm.mixers.arguments import (
    check_input,
    check_padded,
    check_same_documents,
    check_state,
)
from megablocks_core.layers.ssm.mixers.by_heads import Context
from megablocks_core.layers.ssm.mixers.depthwise import DepthwiseConv1d
from megablocks_core.layers.ssm.mixers.float32 import Float32Parameters, wide_dtype
from megablocks_core.layers.ssm.mixers.padding import real_tokens
from megablocks_core.layers.ssm.mixers.state import MixerState
from megablocks_core.parallel import SequenceCut
from megablocks_core.parallel.checks import check_whole

# Of a sequence or of one token, with everything but its tensors bound. The second result is the
# next state, or None where nobody wants it.
Function = Callable[..., tuple[Tensor, Any]]


class Projected(NamedTuple):
    """What the input projections make of a token.

    Attributes:
        gate: [... i].
        channels: Inputs of the convolution [... c].
        steps: What else depends on the token: step sizes, or decays and strengths [... s].
    """

    gate: Tensor
    channels: Tensor
    steps: Tensor


class Mixer(Float32Parameters, ABC):
    """Projections, a short convolution, a scan, a gate and a projection back.

    A sequence goes through ``forward`` or ``prefill``, a token through ``step``; both run the same
    formulas over the functions for a sequence or for a token.

    Attributes:
        hidden_size: H.
        conv1d: Weights of the convolution.
        out_proj: The projection back.
        convolution: Called as ``causal_conv1d``.
        scan: The function over a sequence.
        scan_step: The same for one token.
        sequence_parallel: The ranks of ``tp`` hold equal slices of the tokens.
        tp: The tensor-parallel ranks.
        cp: Ranks that hold pieces of the sequence.
        context: Whether these pass states on, or exchange tokens for heads.
    """

    hidden_size: int
    conv1d: DepthwiseConv1d
    out_proj: nn.Module
    convolution: Function
    scan: Function
    scan_step: Function
    sequence_parallel: bool
    tp: Group
    cp: Group
    context: Context = "states"

    def forward(
        self,
        x_TH: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        cut: SequenceCut | None = None,
    ) -> Tensor:
        """``y`` [... T H] of ``x`` [... T H]; documents of one row see nothing of each other.

        Args:
            x_TH: Input; one row, [T H] or [1 T H], with documents. This rank's tokens under
                sequence parallelism and under ``cut``.
            cu_seqlens: Sums of the documents' lengths, from 0 [E+1].
            cu_seqlens_padded: Where documents are stored, if pads lie between them [E+1].
            cut: How the whole row is cut over ``cp``. It tells where documents are stored; the
                other two then serve to tell pads.

        Raises:
            ValueError: ``x`` is not [... T H]; ``cut`` is missing, over other ranks than ``cp``, or
                of other documents; the documents do not fit the row, or the places where they are
                stored; pads are given without lengths.
        """
        y_TH, _ = self._run(
            x_TH, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens_padded, cut=cut, keep=False
        )
        return y_TH

    def prefill(
        self, x_TH: Tensor, *, state: MixerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        """``y`` as of ``forward``, and the state behind the last tokens.

        Args:
            x_TH: The next tokens of each row, as many as wanted.
            state: What the rows or documents have seen; default nothing.
            cu_seqlens: Sums of the documents' lengths; then states are those of documents.

        Raises:
            ValueError: The mixer was built for pieces of sequences, or see ``forward``.
        """
        self._refuse_pieces("prefill")
        return self._run(x_TH, state=state, cu_seqlens=cu_seqlens, keep=True)

    def step(self, x_BH: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """``y`` [B H] of one token a row, and the next state; ``state`` stays as it is.

        Under sequence parallelism ``x`` and ``y`` hold this rank's rows, the state all of them.

        Raises:
            ValueError: The mixer was built for pieces of sequences, ``x`` is not [B H], or
                ``state`` is not that of B rows.
        """
        self._refuse_pieces("step")
        check_input(x_BH, self.hidden_size, shape="[B H]")
        rows = len(x_BH) * self.tp.size if self.sequence_parallel else len(x_BH)
        check_state(state, self.empty_state(rows))
        gate, channels, steps = self._project(x_BH)
        convolve = partial(causal_conv1d_step, activation=True, state=state.conv)
        scan = partial(self.scan_step, state=state.ssm)
        y_Bi, new = self._mix(channels, steps, _exact(convolve), _exact(scan))
        return self.out_proj(self._gated(y_Bi, gate)), new

    def empty_state(self, rows: int) -> MixerState:
        """The state of ``rows`` rows that have seen nothing: zeros.

        Raises:
            ValueError: ``rows`` is no whole number from 0 on.
        """
        if not torch.compiler.is_compiling():
            check_whole("rows", rows, least=0)
        weight = self.conv1d.weight
        channels, _, width = weight.shape
        return MixerState(
            weight.new_zeros(rows, width - 1, channels),
            weight.new_zeros(rows, *self._state_shape(), dtype=wide_dtype(weight.dtype)),
        )

    @abstractmethod
    def _project(self, x_TH: Tensor) -> Projected:
        """The input projections."""

    @abstractmethod
    def _mix(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function
    ) -> tuple[Tensor, MixerState]:
        """``y`` [... i] before the gate, of a sequence or of one token a row."""

    def _mix_by_heads(
        self, channels: Tensor, steps: Tensor, convolve: Function, scan: Function, cut: SequenceCut
    ) -> tuple[Tensor, MixerState]:
        """``_mix`` of this rank's tokens [B l ...] over all tokens of this rank's heads."""
        raise NotImplementedError(f"{type(self).__name__} passes states on")

    @abstractmethod
    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """What goes into the projection back [... i]."""

    @abstractmethod
    def _state_shape(self) -> tuple[int, ...]:
        """Sizes of a row's state of the scan."""

    def _run(
        self,
        x_TH: Tensor,
        *,
        state: MixerState | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        cut: SequenceCut | None = None,
        keep: bool,
    ) -> tuple[Tensor, MixerState]:
        """A whole sequence, or the pieces that this rank holds; states only if ``keep``."""
        check_input(x_TH, self.hidden_size, shape="[... T H]")
        own = x_TH.shape[-2]
        whole = own * self.tp.size if self.sequence_parallel else own
        self._check(cut, whole, cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)
        if cu_seqlens is None and cu_seqlens_padded is not None:
            raise ValueError(
                "cu_seqlens_padded must come with cu_seqlens, the lengths without pads"
            )
        documents, real_T1 = cu_seqlens, None
        if cu_seqlens is not None and cu_seqlens_padded is not None:
            documents = cu_seqlens_padded
            length = whole if cut is None else cut.length
            check_padded(cu_seqlens, documents, length=length)
            real_T1 = real_tokens(cu_seqlens, documents, length=length, cut=cut)[:, None]
            first = self.tp.rank * own if self.sequence_parallel else 0
            x_TH = x_TH.where(real_T1.narrow(0, first, own), 0)
        projected = self._project(x_TH)
        leading = projected.gate.shape[:-2]
        gate, channels, steps = (
            part.reshape(math.prod(leading), *part.shape[-2:]) for part in projected
        )
        row, mix = {"cu_seqlens": documents}, self._mix
        if cut is not None and self.context == "heads":
            row, mix = {"cu_seqlens": cut.cu_seqlens}, partial(self._mix_by_heads, cut=cut)
        elif cut is not None:
            row = {"cut": cut}
        if state is None:
            before = MixerState(None, None)  # type: ignore[arg-type]
        else:
            rows = len(gate) if documents is None else len(documents) - 1
            check_state(before := state, self.empty_state(rows))
        run = {**row, "return_final_state": keep}
        convolve = partial(self.convolution, activation=True, initial_state=before.conv, **run)
        scan = partial(self.scan, initial_state=before.ssm, **run)
        y_BTi, new = mix(channels, steps, _exact(convolve), _exact(scan))
        y_BTi = self._gated(y_BTi, gate)
        if real_T1 is not None:
            y_BTi = y_BTi.where(real_T1, 0)
        y_TH = self.out_proj(y_BTi.reshape(*leading, *y_BTi.shape[-2:]))
        return y_TH, new

    def _check(self, cut: SequenceCut | None, tokens: int, stored: Tensor | None) -> None:
        """Refuse a cut that does not fit the layout, these tokens or where documents lie."""
        if cut is None and self.cp.size > 1:
            raise ValueError(f"cut=None must say how the row is cut over {self.cp.size} ranks")
        if cut is None:
            return
        if not isinstance(cut, SequenceCut):
            raise ValueError(f"cut={cut!r} must be a SequenceCut")
        if cut.group.ranks != self.cp.ranks:
            raise ValueError(f"cut over {cut.group} must be over cp={self.cp}")
        if tokens != cut.local_length:
            raise ValueError(
                f"cut={cut} must give this rank {tokens} tokens, not {cut.local_length}"
            )
        check_same_documents(cut, stored)

    def _refuse_pieces(self, what: str) -> None:
        if self.cp.size > 1:
            raise ValueError(f"cp={self.cp} must have one rank for {what}, which sees whole rows")


def _exact(function: Function) -> Function:
    """``function`` outside of autocast, which would round what it computes in float32."""

    def call(x: Tensor, *args: Tensor | None, **options: object) -> tuple[Tensor, Any]:
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **options)

    return call
