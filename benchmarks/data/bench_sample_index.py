"""The sample index of 10 million documents against Megatron-LM's compiled one, in one process.

Documents of 1,024 tokens on average, shuffled; samples of 4,096 tokens.
"""

import numpy as np

from benchmarks.data.peers import MEGATRON, TWIN, megatron_helpers
from benchmarks.timing import report, take_turns
from megablocks_core.data.sample_index import build, build_numpy

DOCUMENTS, LENGTH = 10_000_000, 4096


def main() -> None:
    """Print one JSON line a case."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 1024, DOCUMENTS).astype(np.int32)
    documents = np.arange(DOCUMENTS, dtype=np.int32)
    np.random.RandomState(0).shuffle(documents)
    tokens = int(lengths.sum(dtype=np.int64))
    helpers = megatron_helpers()

    def twin() -> np.ndarray:
        return build_numpy(lengths, documents, LENGTH, num_tokens=tokens)

    def theirs() -> np.ndarray:
        return helpers.build_sample_idx_int32(lengths, documents, LENGTH, 1, tokens, True, 1)

    peer, name = (theirs, MEGATRON) if helpers else (twin, TWIN)
    for threads in (1, 2):

        def ours(threads: int = threads) -> np.ndarray:
            return build(lengths, documents, LENGTH, num_tokens=tokens, threads=threads)

        assert np.array_equal(ours(), peer())
        report(
            take_turns(ours, peer),
            benchmark="data/sample_index",
            peer=name,
            case={"documents": DOCUMENTS, "sequence_length": LENGTH},
            limit=1.0 if helpers else None,
            threads=threads,
        )
    if helpers:
        assert np.array_equal(twin(), peer())
        report(
            take_turns(twin, peer, rounds=7),
            benchmark="data/sample_index in NumPy",
            peer=name,
            case={"documents": DOCUMENTS, "sequence_length": LENGTH},
        )


if __name__ == "__main__":
    main()
