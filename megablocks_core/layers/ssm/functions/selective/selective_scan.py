"""The selective scan over whole sequences (https://arxiv.org/abs/2312.00752).

Dimensions: B rows, L tokens, D channels, N features of a state, E documents.
"""

from torch import Tensor

from megablocks_core.layers.ssm.functions.arguments import check_arguments, check_dims, check_shapes
from megablocks_core.layers.ssm.functions.chunked.sequence import over_sequence
from megablocks_core.layers.ssm.functions.selective.chunks import NAME
from megablocks_core.layers.ssm.functions.steps import wide
from megablocks_core.parallel.sequence import SequenceCut


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
    """``s = exp(dt A) s + dt x B``; ``y = s C + D x``, of every channel.

    At least float32 inside. Sends nothing but what ``over_cut`` sends under a cut. Saved for
    backward: the inputs, padded to whole chunks (of each document), and one state every 1,024
    tokens; chunks are computed again.

    Args:
        x: Inputs [B L D].
        dt: Step sizes, after softplus [B L D].
        A: Negative rates of decay [D N].
        B: Input matrices [B L N].
        C: Output matrices [B L N].
        D: Weights of the inputs in the outputs [D].
        chunk_size: Tokens that are computed one after another; it changes nothing.
        initial_state: [B D N], or one a document [E D N]; default zeros.
        cu_seqlens: Sums of the lengths of the documents in the one row, from 0 [E+1].
        cut: How ranks hold the sequence; tensors are this rank's, and documents the cut's.
        return_final_state: Give the last states; else ``None`` in their place.

    Returns:
        ``y`` [B L D] in the dtype of ``x``, and the states behind the last tokens, shaped as
        ``initial_state`` (under a cut zeros where another rank holds the last token).

    Raises:
        ValueError: Shapes do not agree, ``chunk_size`` is not positive, or see
            ``check_documents``.
    """
    optional = {"D": D, "initial_state": initial_state}
    check_arguments(optional, cu_seqlens=cu_seqlens, x=x, dt=dt, A=A, B=B, C=C)
    _check(x, dt, A, B, C, D)
    return over_sequence(
        NAME,
        (x, dt, B, C),
        (A,) if D is None else (A, D),
        state_shape=tuple(A.shape),
        dtype=wide(x),
        chunk_size=chunk_size,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
    )


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    check_dims(x=(x, 3), A=(A, 2))
    rows, length, channels = x.shape
    states = A.shape[1]
    check_shapes(
        dt=(dt, (rows, length, channels)),
        A=(A, (channels, states)),
        B=(B, (rows, length, states)),
        C=(C, (rows, length, states)),
        D=(D, (channels,)),
    )
