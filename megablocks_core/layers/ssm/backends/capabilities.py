"""Which arguments each back end serves, and errors for those that it does not."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Capabilities(NamedTuple):
    """What a function of a back end can take and give. None takes a cut, float64 or no tokens.

    Attributes:
        initial_states: Those of rows.
        final_states: Those of rows.
        final_state_gradients: Of a loss that reads final states.
        documents: ``cu_seqlens``.
        document_initial_states: Beside ``cu_seqlens``.
        document_final_states: Beside ``cu_seqlens``.
    """

    initial_states: bool
    final_states: bool
    final_state_gradients: bool
    documents: bool
    document_initial_states: bool
    document_final_states: bool


CAPABILITIES = {
    "mamba_ssm.mamba_chunk_scan_combined": Capabilities(True, True, True, True, False, False),
    "mamba_ssm.selective_scan_fn": Capabilities(False, True, False, False, False, False),
    "causal_conv1d.causal_conv1d_fn": Capabilities(True, True, True, True, False, False),
    "fla.chunk_gated_delta_rule": Capabilities(True, True, True, True, True, True),
}


def refuse_unserved(
    name: str,
    tensors: Sequence[Tensor | None],
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cut: object | None,
    return_final_state: bool,
    other: dict[str, bool] | None = None,
) -> None:
    """Raise if a call asks for more than the function has.

    Args:
        name: A key of ``CAPABILITIES``.
        tensors: Inputs, of which the first has tokens on dim 1.
        initial_state, cu_seqlens, cut, return_final_state: The call's.
        other: Further needs that are not served, by name: whether the call has them.

    Raises:
        ValueError: With all that is missing.
    """
    able = CAPABILITIES[name]
    given = [tensor for tensor in (*tensors, initial_state) if tensor is not None]
    rows, packed = cu_seqlens is None, cu_seqlens is not None
    stateful = initial_state is not None
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    needs = {
        "initial_state": stateful and rows and not able.initial_states,
        "return_final_state": return_final_state and rows and not able.final_states,
        "return_final_state where gradients are taken": (
            return_final_state and learns and not able.final_state_gradients
        ),
        "cu_seqlens": packed and not able.documents,
        "initial_state with cu_seqlens": stateful and packed and not able.document_initial_states,
        "return_final_state with cu_seqlens": (
            return_final_state and packed and not able.document_final_states
        ),
        "cut": cut is not None,
        "float64": any(tensor.dtype == torch.float64 for tensor in given),
        "rows without tokens": given[0].numel() == 0,
        **(other or {}),
    }
    missing = [need for need, lacking in needs.items() if lacking]
    if missing:
        raise ValueError(f"{name} does not serve {', '.join(missing)}")
