"""The same work in Megatron-LM and Grain, where they are installed.

Run the benchmarks with the Python that ``tools/oracles.sh megatron`` prints: it has both. Where a
peer is missing, ours is compared with its NumPy twin and no limit applies.
"""

import multiprocessing
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from megablocks_core.data.index_file import write_index

MEGATRON, GRAIN, TWIN = "megatron-core compiled helpers", "grain index_shuffle", "NumPy twin"


def megatron_helpers() -> Any:
    """The compiled helpers of megatron-core, or ``None``."""
    return _module("megatron.core.datasets.helpers_cpp")


def grain_shuffle() -> Any:
    """The compiled index shuffle of Grain, or ``None``."""
    folder = "grain._src.python.experimental.index_shuffle.python"
    module = _module(f"{folder}.index_shuffle_module")
    return module and module.index_shuffle


def preprocess_fast(
    tokenizer: Path, lines: Path, prefix: Path, *, processes: int
) -> tuple[float, int]:
    """Seconds that Megatron-LM's ``tools/preprocess_data_fast.py`` takes for JSON lines, and ids.

    It is in no release: these are the calls that it makes, of commit 22c99de5, in this process,
    where the tool imports torch in a new one. gigatoken reads the file and encodes it, and the
    builder flattens awkward arrays in a pool of ``processes``, 128 in the tool; with 1 there is no
    pool. The index is ours, as theirs counts tokens where documents are meant.
    """
    import gigatoken

    start = time.perf_counter()
    source = gigatoken.JsonlFileSource([lines], field="text")
    rows: Any = gigatoken.Tokenizer(tokenizer).encode_files(source)
    bounds = np.linspace(0, len(rows), processes + 1, dtype=int).tolist()
    chunks = [rows[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    if processes == 1:
        parts = list(map(_flattened, chunks))
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            parts = pool.map(_flattened, chunks)
    with open(f"{prefix}.bin", "wb") as file:
        for ids, _ in parts:
            file.write(ids.tobytes())
    lengths = np.concatenate([lengths for _, lengths in parts])
    with open(f"{prefix}.idx", "wb") as file:
        write_index(file, np.dtype("<u2"), lengths, np.arange(len(lengths) + 1), None)
    return time.perf_counter() - start, int(lengths.sum())


def _flattened(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    import awkward

    return np.asarray(awkward.flatten(rows), np.uint16), np.asarray(awkward.num(rows, axis=1))


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
