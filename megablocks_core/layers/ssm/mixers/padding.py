"""Which stored tokens are real, where pads lie between documents.

Dimensions: L tokens, E documents. A lowercase letter is this rank's share of the capital one.
"""

import torch
from torch import Tensor

from megablocks_core.layers.ssm.functions.documents import document_of_token
from megablocks_core.parallel import SequenceCut


def real_tokens(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, *, length: int, cut: SequenceCut | None = None
) -> Tensor:
    """Whether each of this rank's tokens belongs to a document, bool [l].

    Args:
        cu_seqlens: Sums of the documents' lengths [E+1].
        cu_seqlens_padded: Where documents are stored [E+1], see ``check_padded``.
        length: L.
        cut: How the tokens are cut.
    """
    stored = cu_seqlens_padded.long()
    document_L = document_of_token(stored, length)
    place_L = torch.arange(length, device=stored.device) - stored[document_L]
    # What lies behind the last document belongs to none.
    lengths = torch.cat((cu_seqlens.long().diff(), stored.new_zeros(1)))
    real_L = place_L < lengths[document_L]
    if cut is None:
        return real_L
    return torch.cat([real_L[start:stop] for start, stop in cut.pieces])
