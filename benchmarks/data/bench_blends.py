"""Blends of 10 million samples against Megatron-LM's compiled ones, in one process.

Those of 100 sources, which take ten times as long a sample, are of 1 million.
"""

import numpy as np

from benchmarks.data.peers import MEGATRON, TWIN, megatron_helpers
from benchmarks.timing import report, take_turns
from megablocks_core.data.blend_order import blend_numpy, exhaustive, greedy

SHORT = 20_000


def bench(sources: int, samples: int) -> None:
    """Both kinds of blend, of weights as uneven as mixtures have them."""
    helpers = megatron_helpers()
    size = samples if helpers else SHORT
    weights = np.random.default_rng(sources).dirichlet(np.ones(sources))
    sizes = np.maximum((weights * size).astype(np.int64), 1)
    sizes[0] += size - sizes.sum()
    source, index = np.zeros(size, np.int16), np.zeros(size, np.int64)

    def their_greedy() -> None:
        if helpers:
            helpers.build_blending_indices(source, index, weights, sources, size, False)
        else:
            blend_numpy(weights, None, source=source, index=index)

    def their_exhaustive() -> None:
        if helpers:
            helpers.build_exhaustive_blending_indices(source, index, sizes, sources)
        else:
            blend_numpy(sizes / float(size), sizes, source=source, index=index)

    for kind, ours, theirs in (
        ("greedy", lambda: greedy(weights, size), their_greedy),
        ("exhaustive", lambda: exhaustive(sizes), their_exhaustive),
    ):
        theirs()
        result = ours()
        assert np.array_equal(result.source, source)
        assert np.array_equal(result.index, index)
        report(
            take_turns(ours, theirs, rounds=7),
            benchmark="data/blend_order",
            peer=MEGATRON if helpers else TWIN,
            case={"kind": kind, "samples": size, "sources": sources},
            limit=1.0 if helpers else None,
        )


def main() -> None:
    """Print one JSON line a case."""
    for sources, samples in ((8, 10_000_000), (100, 1_000_000)):
        bench(sources, samples)


if __name__ == "__main__":
    main()
