"""A causal depthwise convolution along rows, packed documents, or pieces that ranks hold.

Dimensions: B rows, L tokens of the whole sequence, l of this rank, E documents, C channels,
W taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from megablocks_core.groups import LOCAL
from megablocks_core.layers.ssm.functions.arguments import check_arguments, check_shapes
from megablocks_core.layers.ssm.functions.convolution.edges import (
    carried,
    last_of_documents,
    last_of_rows,
    with_initial_states,
)
from megablocks_core.layers.ssm.functions.convolution.taps import convolve
from megablocks_core.layers.ssm.functions.passing import (
    documents_of,
    final_state,
    halo,
    parts_of,
    tied,
)
from megablocks_core.layers.ssm.functions.steps import wide
from megablocks_core.parallel.checks import check_flags
from megablocks_core.parallel.sequence import SequenceCut


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``y_t = bias + sum_d weight[:, W-1-d] x_(t-d)``, d from 0 to W - 1, each channel by itself.

    Sums are taken in at least float32. Kept for backward are the inputs alone. With documents the
    window of a token ends where its document begins. The step of one token is
    ``causal_conv1d_step``; Triton kernels of the public package ``causal_conv1d`` have channels
    before tokens, a bool as "silu", and what is ``cu_seqlens`` here as ``seq_idx``.

    Under a cut one all-to-all of at most W - 1 tokens a piece, and one in backward. The sum over
    the ranks of final states is the whole, and so are those of the gradients of weights and of
    initial states.

    Args:
        x: [B L C], or this rank's tokens [B l C].
        weight: [C W]; the last tap is the token's own.
        bias: [C].
        activation: The outputs pass through SiLU.
        initial_state: The W - 1 inputs before each row [B W-1 C], or document [E W-1 C], oldest
            first; default zeros.
        cu_seqlens: Sums of the documents' lengths, from 0 [E+1], of one row. What stands behind the
            last one is a document of its own.
        cut: How ranks hold the sequence, of any kind. It tells the documents.
        return_final_state: Else ``None`` is given in its place, and nothing of its size is made.

    Returns:
        ``y`` like ``x``, and the W - 1 inputs up to the last token of each row or document, like
        ``initial_state``; those of an empty document are its initial ones.

    Raises:
        ValueError: Shapes do not fit, ``cu_seqlens`` does not describe one row of documents, or
            comes beside a cut.
    """
    check_flags(activation=activation, return_final_state=return_final_state)
    optional = {"bias": bias, "initial_state": initial_state}
    check_arguments(optional, cu_seqlens=cu_seqlens, x=x, weight=weight)
    _check_shapes(x, weight, bias)
    documents = documents_of(cut, cu_seqlens, tokens=x.shape[1])
    if cut is None:
        # The compiler knows LOCAL by this file's name for it, and not as a default value.
        cut = SequenceCut(x.shape[1], cu_seqlens=cu_seqlens, group=LOCAL, device=x.device)
    _check_state(initial_state, x, weight, documents)
    state = None if initial_state is None else initial_state.to(x.dtype)
    before = halo(x, cut=cut, width=weight.shape[1] - 1)
    parts = parts_of(x, cut)
    if documents is None and state is not None:
        starts = [start for start, _ in cut.pieces]
        before = [carried(state, x, start) for x, start in zip(before, starts, strict=True)]
    ys = _outputs(parts, before, weight, bias, cut=cut, activation=activation, state=state)
    y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=1)
    if not return_final_state:
        return tied(before[0], y)[0], None
    finals = [
        last_of_rows(part, carry)
        if documents is None
        else last_of_documents(part, carry, state, cu_seqlens=documents, start=start)
        for part, carry, (start, _) in zip(parts, before, cut.pieces, strict=True)
    ]
    y, final = tied(before[0], y, final_state(finals, cut=cut, initial_state=state))
    return y, final


def _outputs(
    parts: Sequence[Tensor],
    before: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    *,
    cut: SequenceCut,
    activation: bool,
    state: Tensor | None,
) -> list[Tensor]:
    """The outputs of each piece, whose rows know by ``before`` what comes before them."""
    documents = cut.cu_seqlens
    places = cut.positions.split([part.shape[1] for part in parts])
    pieces = list(zip(parts, before, places, cut.pieces, strict=True))
    if documents is None:
        return [convolve(x, carry, weight, bias, activation=activation) for x, carry, *_ in pieces]
    if state is None:
        return [
            convolve(x, carry, weight, bias, places=within, activation=activation)
            for x, carry, within, _ in pieces
        ]
    ys = []
    for x, carry, within, (start, _) in pieces:
        z = convolve(x.to(wide(x)), carry, weight, bias, places=within)
        z = with_initial_states(z, state.to(z.dtype), weight, cu_seqlens=documents, start=start)
        ys.append((silu(z) if activation else z).to(x.dtype))
    return ys


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 3:
        raise ValueError(f"x of shape {tuple(x.shape)} must have rows, tokens and channels")
    channels = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} must have taps for the {channels} channels of x"
        )
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} must be one number for the {channels} channels of x"
        )


def _check_state(state: Tensor | None, x: Tensor, weight: Tensor, documents: Tensor | None) -> None:
    count = x.shape[0] if documents is None else len(documents) - 1
    check_shapes(initial_state=(state, (count, weight.shape[1] - 1, x.shape[2])))
