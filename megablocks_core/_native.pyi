"""What the extension offers; see cpp/native.cpp and the NumPy twins."""

import numpy as np
from numpy.typing import NDArray

def gather_tokens(
    tokens: NDArray[np.integer],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    out: NDArray[np.int64],
    threads: int = 1,
) -> None:
    """Write ranges of ``tokens`` into ``out``, checked, on up to ``threads`` threads."""
