"""Which probabilities an attention drops: by counter, so that layouts and kernels do not matter."""

from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.parallel.counter import bits_of


class Dropped(NamedTuple):
    """Which probabilities are dropped.

    Attributes:
        p: The probability of that.
        stream: Name of the layer.
        index_BTN: A word for each query of each head, from ``index_of_heads`` [B T N].
    """

    p: float
    stream: str
    index_BTN: Tensor


def index_of_heads(index_T: Tensor, heads: slice) -> Tensor:
    """Words for queries in ``heads`` of the whole layer, from words for tokens: [... T n]."""
    numbers_n = torch.arange(heads.start, heads.stop, device=index_T.device)
    return bits_of(index_T.unsqueeze(-1), numbers_n)
