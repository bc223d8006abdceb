"""The kernels of the package ``causal_conv1d`` behind the signatures of this library.

Dimensions: B rows, L tokens, C channels, W taps.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.backends.capabilities import refuse_unserved
from megablocks_core.layers.ssm.functions.documents import check_documents, document_of_token
from megablocks_core.parallel.optional import imported
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
    """``layers.ssm.causal_conv1d`` by ``causal_conv1d_fn``, without a copy of x [B L C].

    Raises:
        ValueError: The call has a need that is not served: beside those of ``CAPABILITIES`` less
            than 2 or more than 4 taps, and channels that are no multiple of 8.
        ImportError: ``causal_conv1d`` is missing.
    """
    refuse_unserved(
        "causal_conv1d.causal_conv1d_fn",
        (x, weight, bias),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
        other=_sizes(weight),
    )
    check_documents(cu_seqlens, rows=x.shape[0], length=x.shape[1])
    convolve = imported("causal_conv1d", "causal_conv1d_fn", extra="conv1d")
    document_L = None if cu_seqlens is None else document_of_token(cu_seqlens, x.shape[1])
    given = convolve(
        x.contiguous().transpose(1, 2),
        weight,
        bias,
        seq_idx=None if document_L is None else document_L[None].int(),
        initial_states=None if initial_state is None else _by_channel(initial_state, x),
        return_final_states=return_final_state,
        activation="silu" if activation else None,
    )
    if not return_final_state:
        return given.transpose(1, 2), None
    y, final = given
    return y.transpose(1, 2), final.transpose(1, 2)


def causal_conv1d_step(
    x_BC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    *,
    state: Tensor,
    activation: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token [B C] by ``causal_conv1d_update``; ``state`` [B W-1 C] stays as it is.

    Raises:
        ValueError: There are less than 2 or more than 4 taps, or float64.
        ImportError: ``causal_conv1d`` is missing.
    """
    needs = {"float64": x_BC.dtype == torch.float64, **_sizes(weight_CW)}
    needs.pop(_CHANNELS)
    missing = [need for need, lacking in needs.items() if lacking]
    if missing:
        raise ValueError(f"causal_conv1d.causal_conv1d_update does not serve {', '.join(missing)}")
    update = imported("causal_conv1d", "causal_conv1d_update", extra="conv1d")
    # It writes the next state over the one it gets.
    after_BCV = state.to(x_BC.dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    y = update(x_BC, after_BCV, weight_CW, bias_C, activation="silu" if activation else None)
    return y, after_BCV.transpose(1, 2)


_CHANNELS = "channels that are no multiple of 8"


def _sizes(weight: Tensor) -> dict[str, bool]:
    channels, width = weight.shape
    return {f"{width} taps": not 2 <= width <= 4, _CHANNELS: channels % 8 != 0}


def _by_channel(state: Tensor, x: Tensor) -> Tensor:
    return state.to(x.dtype).contiguous().transpose(1, 2)
