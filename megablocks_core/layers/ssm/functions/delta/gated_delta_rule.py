"""The gated delta rule over whole sequences (https://arxiv.org/abs/2412.06464).

Dimensions: B rows, L tokens, H heads, K and V features of keys and values, E documents, m steps
of a token.
"""

import math

from torch import Tensor
from torch.nn.functional import pad

from megablocks_core.layers.ssm.functions.arguments import check_arguments, check_dims, check_shapes
from megablocks_core.layers.ssm.functions.chunked.sequence import over_sequence
from megablocks_core.layers.ssm.functions.delta.chunks import NAME
from megablocks_core.layers.ssm.functions.steps import wide
from megablocks_core.parallel.checks import check_number, check_whole
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
    """Outputs of a memory of which every token replaces what its key recalls.

    ``s = exp(g) s``; ``s = s + k (beta (v - k^T s))^T``; ``o = scale q^T s``, in chunks: a
    triangular system within each (section 3.3), states from chunk to chunk. With ``householders``
    m > 1 a token makes m steps, of which the first decays (DeltaProduct,
    https://arxiv.org/abs/2502.10297).

    At least float32 inside. Sends nothing but what ``over_cut`` sends under a cut. Saved for
    backward: the inputs, padded to whole chunks (of each document), and one state every 1,024
    steps; chunks are computed again.

    Args:
        q: Queries [B L H K].
        k: Keys [B mL H K], of length 1 if the state shall not grow.
        v: Values [B mL H V].
        g: Logarithms of decays, at most 0 [B L H].
        beta: How much is replaced [B mL H], between 0 and 1, or 2 for negative eigenvalues.
        scale: Of the output; default 1 / sqrt(K).
        chunk_size: Steps that are computed at once; it changes nothing.
        householders: m.
        initial_state: [B H K V], or one a document [E H K V]; default zeros.
        cu_seqlens: Sums of the lengths of the documents in the one row, from 0 [E+1].
        cut: How ranks hold the sequence; tensors are this rank's, and documents the cut's.
        return_final_state: Give the last states; else ``None`` in their place.

    Returns:
        ``o`` [B L H V] in the dtype of ``q``, and the states behind the last tokens, shaped as
        ``initial_state`` (under a cut zeros where another rank holds the last token).

    Raises:
        ValueError: Shapes do not agree, a number is not positive, or see ``check_documents``.
    """
    optional = {"initial_state": initial_state}
    check_arguments(optional, cu_seqlens=cu_seqlens, q=q, k=k, v=v, g=g, beta=beta)
    _check(q, k, v, g, beta, householders)
    if scale is not None:
        check_number("scale", scale, "finite", math.isfinite)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if householders > 1:
        q, g = _at_step(q, -1, householders), _at_step(g, 0, householders)
    o, state = over_sequence(
        NAME,
        (q * factor, k, v, g, beta),
        state_shape=(q.shape[2], q.shape[3], v.shape[3]),
        dtype=wide(q),
        chunk_size=chunk_size,
        steps=householders,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cut=cut,
        return_final_state=return_final_state,
    )
    return (o if householders == 1 else o[:, householders - 1 :: householders]), state


def _at_step(x: Tensor, step: int, steps: int) -> Tensor:
    """``x`` [B L ...] at one of the steps of each token, zeros at the others [B mL ...]."""
    before = step % steps
    blank = (0, 0) * (x.dim() - 2)
    return pad(x[:, :, None], (*blank, before, steps - 1 - before)).flatten(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, householders: int) -> None:
    check_whole("householders", householders, least=1)
    check_dims(q=(q, 4), v=(v, 4))
    rows, length, heads, keys = q.shape
    if not keys:
        raise ValueError(f"q of shape {tuple(q.shape)} must have at least one feature")
    steps = householders * length
    check_shapes(
        k=(k, (rows, steps, heads, keys)),
        v=(v, (rows, steps, heads, v.shape[3])),
        g=(g, (rows, length, heads)),
        beta=(beta, (rows, steps, heads)),
    )
