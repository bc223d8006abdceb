"""The order in which a blend draws from its sources, as in Megatron-LM.

Always next is the source furthest behind its share: with the largest ``weight * max(t, 1) -
drawn`` after t draws, of several the first. Within a source samples come in its own order.
Dimensions: D sources, n samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megablocks_core.data.checks import MOST, row, whole_number
from megablocks_core.data.extension import native as _native

MOST_INT16 = 2**15  # sources that int16 can number


class BlendOrder(NamedTuple):
    """Sample k of the blend is sample ``index[k]`` of source ``source[k]``."""

    source: NDArray[np.integer]  # [n] int16, or int32 above 32,768 sources
    index: NDArray[np.int64]  # [n]


def greedy(weights: Sequence[float] | NDArray[np.floating], size: int) -> BlendOrder:
    """Draw ``size`` samples from sources in proportion to ``weights`` [D], which should sum to 1.

    Every source with a weight is drawn at least once early on; one of weight 0 never is. A source
    can be drawn a few times more than ``size * weight`` says.

    Raises:
        ValueError: weights that are negative, all zero or not finite; a negative ``size``.

    Source: ``build_blending_indices`` of Megatron-LM, with its bits.
    """
    try:
        given = np.ascontiguousarray(weights, np.float64)
    except (TypeError, ValueError, OverflowError):
        given = np.empty(())
    if given.ndim != 1 or not np.isfinite(given).all() or given.min(initial=0) < 0:
        raise ValueError(f"weights={weights} must be a row of numbers, finite and 0 or more")
    if not given.any():
        raise ValueError(f"weights={weights} must have one above 0")
    return _draw(given, None, whole_number("size", size, 0))


def exhaustive(sizes: Sequence[int] | NDArray[np.integer]) -> BlendOrder:
    """Draw every sample of sources of the given sizes [D] once, in proportion to the sizes.

    Raises:
        ValueError: sizes that are negative or not whole numbers.

    Source: ``build_exhaustive_blending_indices`` of Megatron-LM, with its bits.
    """
    given = row("sizes", sizes)
    total = sum(given.tolist())
    if given.min(initial=0) < 0 or total > MOST:
        raise ValueError(f"sizes={sizes} must be 0 or more and sum to at most {MOST}")
    return _draw(given / float(max(total, 1)), given, total)


def _draw(
    weights: NDArray[np.float64], sizes: NDArray[np.int64] | None, num_samples: int
) -> BlendOrder:
    dtype = np.int16 if len(weights) <= MOST_INT16 else np.int32
    source, index = np.empty(num_samples, dtype), np.empty(num_samples, np.int64)
    used = np.flatnonzero(weights)
    if num_samples:
        draw = blend_numpy if _native is None else _native.blend
        draw(weights[used], None if sizes is None else sizes[used], source=source, index=index)
    return BlendOrder(source if len(used) == len(weights) else used.astype(dtype)[source], index)


def blend_numpy(
    weights: NDArray[np.float64],
    sizes: NDArray[np.int64] | None,
    *,
    source: NDArray[np.integer],
    index: NDArray[np.int64],
) -> None:
    """Fill ``source`` and ``index`` one sample at a time: the plain twin of the C++."""
    drawn = np.zeros(len(weights))
    for sample in range(len(source)):
        chosen = int((weights * max(sample, 1) - drawn).argmax())
        source[sample], index[sample] = chosen, drawn[chosen]
        drawn[chosen] += 1
        if sizes is not None and drawn[chosen] == sizes[chosen]:
            drawn[chosen] = np.inf  # spent
