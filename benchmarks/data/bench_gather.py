"""Native gather of token ranges against its NumPy twin: one process, interleaved rounds.

A batch is samples of 4,097 uint16 tokens from a memory map of 256 MB, each in 1, 8 or 64 ranges.
On two cores, 64 samples a batch: 0.26, 0.12 and 0.07 of the twin's time with 1, 8 and 64 ranges;
1,024 samples: 0.5, 0.18 and 0.05, and no less with a second thread while the map is in memory.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import report, take_turns
from megablocks_core.data.gather import gather_tokens, gather_tokens_numpy

LENGTH, NUM_TOKENS = 4097, 1 << 27


def bench(tokens: np.ndarray, samples: int, ranges_per_sample: int, threads: int) -> None:
    """One batch, gathered by both."""
    lengths = np.full(samples * ranges_per_sample, LENGTH // ranges_per_sample)
    lengths[::ranges_per_sample] += LENGTH % ranges_per_sample
    starts = np.random.default_rng(0).integers(0, NUM_TOKENS - lengths)
    out = np.empty((2, samples * LENGTH), dtype=np.int64)

    def native() -> None:
        gather_tokens(tokens, starts, lengths, out=out[0], threads=threads)

    def twin() -> None:
        gather_tokens_numpy(tokens, starts, lengths, out=out[1])

    native()
    twin()
    assert np.array_equal(out[0], out[1])
    report(
        take_turns(native, twin),
        benchmark="data/gather",
        peer="NumPy twin",
        case={"samples": samples, "ranges_per_sample": ranges_per_sample},
        threads=threads,
    )


def main() -> None:
    """Print one JSON line a case."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 65_536, NUM_TOKENS, dtype=np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        for samples, threads in ((64, 1), (1024, 1), (1024, 2)):
            for ranges_per_sample in (1, 8, 64):
                bench(tokens, samples, ranges_per_sample, threads)


if __name__ == "__main__":
    main()
