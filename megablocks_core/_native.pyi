"""What the extension offers; see cpp/native.cpp and the twins."""

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

def permute(
    places: NDArray[np.int64],
    *,
    keys: NDArray[np.uint64],
    low_bits: int,
    rows: int,
    size: int,
    out: NDArray[np.int64],
    threads: int = 1,
) -> bool:
    """Write the element at each place into ``out``; false if a place is outside."""

def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    *,
    sequence_length: int,
    extra: int,
    num_tokens: int,
    out: NDArray[np.integer],
    threads: int = 1,
) -> None:
    """Write the place and offset at which each sample begins into ``out``."""

def blend(
    weights: NDArray[np.float64],
    sizes: NDArray[np.int64] | None,
    *,
    source: NDArray[np.integer],
    index: NDArray[np.int64],
) -> None:
    """Write which source each sample comes from, and which of its samples it is."""

def first_fit(lengths: NDArray[np.int64], *, capacity: int, bins: NDArray[np.int64]) -> None:
    """Write the first bin that has room for each item, in the given order."""

def texts_of_lines(
    lines: bytes, *, key: bytes, max_bytes: int
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """The texts under a key of JSON lines, a NUL after each; their ends; their lines' numbers.

    Then the number, begin and end of each line that is left to the twin, end to end, which no blank
    one is; and how many lines there are.
    """

def softmax_sums(
    logits: NDArray[np.float32 | np.int16],
    targets: NDArray[np.int64],
    *,
    out: NDArray[np.float32],
    threads: int = 1,
) -> None:
    """Write each token's numbers into the rows of ``out``; int16 are the bits of bfloat16."""

def softmax_gradients(
    logits: NDArray[np.float32 | np.int16],
    targets: NDArray[np.int64],
    *,
    terms: NDArray[np.float32],
    threads: int = 1,
) -> None:
    """Make gradients of logits, in their place; int16 are the bits of bfloat16."""

def hidden_rows(
    gate: NDArray[np.float32 | np.int16],
    up: NDArray[np.float32 | np.int16],
    *,
    weights: NDArray[np.float32],
    activation: tuple[float, float, float],
    out: NDArray[np.float32 | np.int16],
    threads: int = 1,
) -> None:
    """Write weighted SwiGLU into the first rows of ``out``, and zeros into the others."""

def hidden_gradients(
    gate: NDArray[np.float32 | np.int16],
    up: NDArray[np.float32 | np.int16],
    *,
    weights: NDArray[np.float32],
    activation: tuple[float, float, float],
    of_hidden: NDArray[np.float32 | np.int16],
    hidden: NDArray[np.float32 | np.int16],
    of_gate: NDArray[np.float32 | np.int16],
    of_up: NDArray[np.float32 | np.int16],
    of_weights: NDArray[np.float32],
    threads: int = 1,
) -> None:
    """Write weighted SwiGLU again and its gradients, with zeros in the rows that are too many."""

def ask_for_huge_pages(memory: NDArray[np.uint8]) -> None:
    """Ask the system for large pages under memory that is still untouched."""

def is_intel() -> bool:
    """Whether Intel made this processor; also where the build cannot tell."""

def bfloat16_units() -> list[str]:
    """By what this build and this processor multiply bfloat16, the fastest first.

    "tiles" (AMX) and "vectors" (AVX-512).
    """

def experts_forward(
    gate: NDArray[np.int16],
    up: NDArray[np.int16],
    down: NDArray[np.int16],
    *,
    x: NDArray[np.int16],
    rows: NDArray[np.int64],
    weights: NDArray[np.float32],
    counts: NDArray[np.int64],
    activation: tuple[float, float, float],
    lower: NDArray[np.int16],
    upper: NDArray[np.int16],
    out: NDArray[np.int16],
    unit: str,
    threads: int = 1,
) -> None:
    """Write weighted SwiGLU experts into ``out``; backward reads ``lower`` and ``upper`` again."""

def experts_backward(
    gate: NDArray[np.int16],
    up: NDArray[np.int16],
    down: NDArray[np.int16],
    *,
    x: NDArray[np.int16],
    rows: NDArray[np.int64],
    weights: NDArray[np.float32],
    counts: NDArray[np.int64],
    activation: tuple[float, float, float],
    dy: NDArray[np.int16],
    lower: NDArray[np.int16],
    upper: NDArray[np.int16],
    of_x: NDArray[np.int16] | None,
    of_weights: NDArray[np.float32],
    of_gate: NDArray[np.int16] | None,
    of_up: NDArray[np.int16] | None,
    of_down: NDArray[np.int16] | None,
    adds: tuple[bool, bool, bool],
    unit: str,
    threads: int = 1,
) -> None:
    """Write the gradients that are wanted, or add them to what is there."""

def selective_chunk(
    x: NDArray[np.float32 | np.float64],
    dt: NDArray[np.float32 | np.float64],
    B: NDArray[np.float32 | np.float64],
    C: NDArray[np.float32 | np.float64],
    A: NDArray[np.float32 | np.float64],
    state: NDArray[np.float32 | np.float64],
    *,
    y: NDArray[np.float32 | np.float64] | None,
    behind: NDArray[np.float32 | np.float64],
    threads: int = 1,
) -> None:
    """Write outputs of a chunk of the selective scan, if they are wanted, and the state behind."""

def selective_chunk_gradients(
    x: NDArray[np.float32 | np.float64],
    dt: NDArray[np.float32 | np.float64],
    B: NDArray[np.float32 | np.float64],
    C: NDArray[np.float32 | np.float64],
    A: NDArray[np.float32 | np.float64],
    state: NDArray[np.float32 | np.float64],
    *,
    of_y: NDArray[np.float32 | np.float64] | None,
    of_behind: NDArray[np.float32 | np.float64],
    of_x: NDArray[np.float32 | np.float64],
    of_dt: NDArray[np.float32 | np.float64],
    of_B: NDArray[np.float32 | np.float64],
    of_C: NDArray[np.float32 | np.float64],
    of_A: NDArray[np.float32 | np.float64],
    of_state: NDArray[np.float32 | np.float64],
    threads: int = 1,
) -> None:
    """Write gradients of such a chunk; that of ``A`` is added to what is there."""
