"""The kernels of the package ``mamba_ssm`` behind the signatures of this library.

Dimensions: B rows, L tokens, H heads in G groups, P features of a head, D channels, N features of
a state.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.backends.capabilities import refuse_unserved
from megablocks_core.layers.ssm.functions.documents import check_documents, document_of_token
from megablocks_core.parallel.optional import imported
from megablocks_core.parallel.sequence import SequenceCut


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``layers.ssm.ssd_chunk_scan`` by ``mamba_chunk_scan_combined``.

    Its chunks are a power of two from 16 to 256, the next one from ``chunk_size`` on.

    Raises:
        ValueError: The call has a need that is not served.
        ImportError: ``mamba_ssm`` is missing.
    """
    refuse_unserved(
        "mamba_ssm.mamba_chunk_scan_combined",
        (x, dt, A, B, C, D),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
    )
    check_documents(cu_seqlens, rows=x.shape[0], length=x.shape[1])
    document_L = None if cu_seqlens is None else document_of_token(cu_seqlens, x.shape[1])
    module = "mamba_ssm.ops.triton.ssd_combined"
    scan = imported(module, "mamba_chunk_scan_combined", extra="mamba")
    given = scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=min(max(1 << (chunk_size - 1).bit_length(), 16), 256),
        D=D,
        initial_states=initial_state,
        seq_idx=None if document_L is None else document_L[None].int(),
        return_final_states=return_final_state,
    )
    return given if return_final_state else (given, None)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cut: SequenceCut | None = None,
    return_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``layers.ssm``'s ``selective_scan`` by ``selective_scan_fn``, which has chunks of its own.

    Tokens' tensors get their widest dtype, since theirs must be alike.

    Raises:
        ValueError: The call has a need that is not served.
        ImportError: ``mamba_ssm`` is missing.
    """
    refuse_unserved(
        "mamba_ssm.selective_scan_fn",
        (x, dt, A, B, C, D),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
    )
    scan = imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", extra="mamba")
    kind = x.dtype
    for part in (dt, B, C):
        kind = torch.promote_types(kind, part.dtype)
    u, delta, B_BNL, C_BNL = (part.to(kind).transpose(1, 2) for part in (x, dt, B, C))
    skip = None if D is None else D.float()
    given = scan(u, delta, A.float(), B_BNL, C_BNL, D=skip, return_last_state=return_final_state)
    y, final = given if return_final_state else (given, None)
    return y.transpose(1, 2).to(x.dtype), final
