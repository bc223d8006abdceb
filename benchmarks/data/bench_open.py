"""Opening an index of 100 million documents, and the first batch of it, against what is promised.

An index of 2 GB, in memory after it was written, and a token file that takes no space. Each round
opens it in a process of its own, twice: first to open it, then for a batch of 8 samples of 4,096
tokens. The peer's time is the promise, 100 ms to open and 200 ms for the first batch; under 100 MB
resident after opening is asserted. ``resident_mb`` in the case is all of the process, the
interpreter and NumPy included; after the batch most of it is pages of the index that the kernel
maps around those touched, which it shares between processes and takes back at will. On two
cores of an AMD EPYC that did other work: 0.4 ms to open, 38 MB resident, 10 ms until the first
batch. (``megatron-core`` maps the files likewise, unchecked: 0.3 to 0.9 ms.)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.timing import ROUNDS, WARM_UPS, Times, report
from megablocks_core.data import IndexedDataset
from megablocks_core.data.index_file import CODES, HEADER, MAGIC, VERSION

DOCUMENTS, PIECE = 100_000_000, 1_000_000
OPEN_S, BATCH_S, RESIDENT_MB = 0.1, 0.2, 100

PROGRAM = """
import json, sys, time
import megablocks_core.data as data
from megablocks_core.data import GPTDataset, IndexedDataset

def resident_mb():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1000)

start = time.perf_counter()
corpus = IndexedDataset(sys.argv[1])
opened = time.perf_counter()
after_opening = resident_mb()
again = time.perf_counter()
batch = GPTDataset(corpus, 4096, seed=1).batch(range(8))
first_batch = time.perf_counter() - again + opened - start
assert batch["tokens"].shape == (1, 8 * 4096) and len(batch["cu_seqlens"]) > 8
found = {"open": opened - start, "batch": first_batch}
found |= {"open_mb": after_opening, "batch_mb": resident_mb()}
print(json.dumps(found))
"""


def write_corpus(prefix: Path) -> int:
    """Write the index a piece at a time; the token file is a hole. Its number of tokens."""
    lengths = np.arange(PIECE, dtype="<i4") % 61
    before = np.cumsum(lengths, dtype="<i8") - lengths
    pieces, whole = DOCUMENTS // PIECE, int(lengths.sum())
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype("<u2")], DOCUMENTS, DOCUMENTS + 1))
        for _ in range(pieces):
            file.write(lengths.data)
        for piece in range(pieces):
            file.write((2 * (before + piece * whole)).data)
        for piece in range(pieces):
            file.write(np.arange(piece * PIECE, (piece + 1) * PIECE, dtype="<i8").data)
        file.write(np.array([DOCUMENTS], "<i8").data)
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(2 * pieces * whole)
    return pieces * whole


def check(prefix: Path, num_tokens: int) -> None:
    """What is opened is what was written, at random places and at both ends."""
    corpus = IndexedDataset(prefix)
    assert (corpus.num_documents, corpus.num_tokens) == (DOCUMENTS, num_tokens)
    whole = num_tokens // (DOCUMENTS // PIECE)
    lengths = np.arange(PIECE) % 61
    starts = np.cumsum(lengths) - lengths
    for document in [0, DOCUMENTS - 1, *np.random.default_rng(0).integers(0, DOCUMENTS, 1000)]:
        piece, place = divmod(int(document), PIECE)
        assert corpus.document_start(int(document)) == piece * whole + starts[place]
        assert len(corpus[int(document)]) == lengths[place]


def main() -> None:
    """Print one JSON line a case."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        check(prefix, write_corpus(prefix))
        command = [sys.executable, "-c", PROGRAM, str(prefix)]
        rounds = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(WARM_UPS + ROUNDS)
        ][WARM_UPS:]
    for what, promise in (("open", OPEN_S), ("batch", BATCH_S)):
        resident = max(found[f"{what}_mb"] for found in rounds)
        assert what != "open" or resident < RESIDENT_MB, f"{resident} MB resident"
        report(
            Times([found[what] for found in rounds], [promise] * len(rounds)),
            benchmark="data/open",
            peer="the promise",
            case={"documents": DOCUMENTS, "until": what, "resident_mb": resident},
            limit=1.0,
        )


if __name__ == "__main__":
    main()
