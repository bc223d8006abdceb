"""Native gather of token ranges against memcpy and its NumPy twin: one process, in turns.

A batch is samples of 4,097 uint16 tokens from a memory map of 256 MB, each in 1, 8 or 64 ranges.
The memcpy takes the same tokens, neighbours at another random place each time, as they are: it
writes two bytes a token where the gather writes eight. The gather may take twice as long.
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


def bench_memcpy(tokens: np.ndarray, samples: int, threads: int) -> None:
    """Neighbouring samples, gathered and copied."""
    size = samples * LENGTH
    places = np.random.default_rng(0).integers(0, NUM_TOKENS - size, 256).tolist()
    calls = {"native": 0, "memcpy": 0}
    out, copied = np.empty(size, np.int64), np.empty(size, np.uint16)
    offsets, lengths = np.arange(samples) * LENGTH, np.full(samples, LENGTH)

    def next_place(side: str) -> int:
        calls[side] += 1
        return places[calls[side] % len(places)]

    def native() -> None:
        starts = offsets + next_place("native")
        gather_tokens(tokens, starts, lengths, out=out, threads=threads)

    def memcpy() -> None:
        place = next_place("memcpy")
        np.copyto(copied, tokens[place : place + size])

    native()
    memcpy()
    assert np.array_equal(out, copied)
    report(
        take_turns(native, memcpy, repeats=5),
        benchmark="data/gather",
        peer="memcpy of the uint16 source",
        case={"samples": samples},
        limit=2.0,
        threads=threads,
    )


def main() -> None:
    """Print one JSON line a case."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 65_536, NUM_TOKENS, dtype=np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        for samples, threads in ((64, 1), (1024, 1), (1024, 2)):
            bench_memcpy(tokens, samples, threads)
            for ranges_per_sample in (1, 8, 64):
                bench(tokens, samples, ranges_per_sample, threads)


if __name__ == "__main__":
    main()
