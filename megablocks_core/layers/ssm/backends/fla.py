"""The kernels of flash-linear-attention behind the signatures of this library.

Dimensions: B rows, L tokens, H heads, K and V features of keys and values, E documents.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.backends.capabilities import refuse_unserved
from megablocks_core.layers.ssm.functions.documents import check_documents
from megablocks_core.parallel.optional import imported
from megablocks_core.parallel.sequence import SequenceCut


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
    householders: int = 1,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``layers.ssm``'s ``gated_delta_rule`` by ``chunk_gated_delta_rule``, in chunks of its own.

    What stands behind the last document is handed on as one more, which may be empty.

    Raises:
        ValueError: The call has a need that is not served: beside those of ``CAPABILITIES`` more
            than one householder.
        ImportError: ``fla`` is missing.
    """
    refuse_unserved(
        "fla.chunk_gated_delta_rule",
        (q, k, v, g, beta),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
        other={f"householders={householders}": householders != 1},
    )
    check_documents(cu_seqlens, rows=q.shape[0], length=q.shape[1])
    rule = imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", extra="fla")
    bounds = None
    if cu_seqlens is not None:
        bounds = torch.cat((cu_seqlens.long(), cu_seqlens.new_full((1,), q.shape[1]).long()))
        if initial_state is not None:
            initial_state = torch.cat((initial_state, torch.zeros_like(initial_state[:1])))
    o, final = rule(
        q,
        k,
        v,
        g,
        beta,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=return_final_state,
        cu_seqlens=bounds,
    )
    if not return_final_state:
        return o, None
    return o, final if bounds is None else final[:-1]
