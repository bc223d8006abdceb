"""Random samples of 4,096 tokens against Megatron-LM's ``GPTDataset``, in one process.

A corpus of 100,000 samples in uint16, in memory once it is written, of documents of 1,024 tokens on
average. ``windows`` are the tokens alone, in the native order, by NumPy and by C++; ``items`` are
the same four tensors as the reference's, of the same samples in the same order.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data.peers import megatron_helpers
from benchmarks.timing import report, take_turns
from megablocks_core.data import (
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    Permutation,
    as_tensors,
    extension,
    gather_tokens,
    permutation,
)
from megablocks_core.data.gather import gather_tokens_numpy
from tests.data.megatron import megatron_dataset

SAMPLES, LENGTH, BATCH, PEER = 100_000, 4096, 64, "megatron-core GPTDataset"
TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


def write(prefix: Path) -> IndexedDataset:
    """Write the corpus; reading it all once puts it in the page cache."""
    rng = np.random.default_rng(0)
    left = SAMPLES * LENGTH + 1
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        while left:
            lengths = np.minimum(rng.geometric(1 / 1024, 1000), left)
            lengths = lengths[lengths.cumsum() <= left]
            if not len(lengths):
                lengths = np.array([left])
            tokens = rng.integers(0, 50_000, lengths.sum(), dtype=np.uint16)
            for document in np.split(tokens, lengths.cumsum()[:-1]):
                builder.add_document(document)
            left -= int(lengths.sum())
    indexed = IndexedDataset(prefix)
    assert int(indexed.tokens[:].sum(dtype=np.int64)) > 0
    return indexed


class Draws:
    """Other random samples for each call, the same ones for both sides."""

    def __init__(self) -> None:
        self.samples = np.random.default_rng(1).integers(0, SAMPLES, (4096, BATCH))
        self.calls = 0

    def __call__(self) -> np.ndarray:
        """Return the next [BATCH] sample numbers."""
        self.calls += 1
        return self.samples[self.calls % len(self.samples)]


def main() -> None:
    """Print one JSON line a case."""
    if megatron_helpers() is None:
        return  # there is nothing to compare with
    with tempfile.TemporaryDirectory() as folder:
        indexed = write(Path(folder) / "corpus")
        windows(indexed)
        items(indexed)


def reference(indexed: IndexedDataset) -> Any:
    """The reference over all of the corpus."""
    return megatron_dataset(
        indexed.prefix, LENGTH, seed=0, num_samples=SAMPLES, sequences=range(len(indexed))
    )


def windows(indexed: IndexedDataset) -> None:
    """The tokens alone."""
    theirs, order = reference(indexed), Permutation(SAMPLES, seed=0)
    tokens = np.asarray(indexed.tokens[:])
    out, lengths = np.empty((BATCH, LENGTH + 1), np.int64), np.full(BATCH, LENGTH + 1)
    native = extension.native

    def ours(draws: Draws) -> None:
        starts = order(draws()) * LENGTH
        if native is None:
            gather_tokens_numpy(tokens, starts, lengths, out=out.reshape(-1))
        else:
            gather_tokens(tokens, starts, lengths, out=out.reshape(-1))

    def peer(draws: Draws) -> list[Any]:
        return [theirs[k] for k in draws().tolist()]

    for way, limit in (("numpy", 1 / 8), ("native", 1 / 18)):
        native = permutation._native = None if way == "numpy" else extension.native
        first = Draws()
        ours(first)
        start = order(int(first.samples[1][0])) * LENGTH
        assert np.array_equal(out[0], tokens[start : start + LENGTH + 1])
        ours_draws, peer_draws = Draws(), Draws()
        report(
            take_turns(lambda a=ours_draws: ours(a), lambda b=peer_draws: peer(b)),
            benchmark="data/gpt windows",
            peer=PEER,
            case={"samples": SAMPLES, "sequence_length": LENGTH, "batch": BATCH, "way": way},
            limit=round(limit, 3),
        )


def items(indexed: IndexedDataset) -> None:
    """The same tensors of the same samples."""
    theirs = reference(indexed)
    dataset = GPTDataset(
        indexed,
        LENGTH,
        seed=0,
        order="megatron",
        num_samples=SAMPLES,
        cross_document_attention=True,
        restart_positions=False,
    )

    def ours(samples: np.ndarray) -> dict:
        batch = as_tensors(dataset.batch(samples))
        return {name: batch[name].view(BATCH, LENGTH) for name in TENSORS}

    def peer(samples: np.ndarray) -> list[dict]:
        return [theirs[k] for k in samples.tolist()]

    draws = Draws()
    for samples in draws.samples[:4]:
        batch, references = ours(samples), peer(samples)
        for name in TENSORS:
            assert torch.equal(batch[name], torch.stack([item[name] for item in references]))
    ours_draws, peer_draws = Draws(), Draws()
    report(
        take_turns(lambda: ours(ours_draws()), lambda: peer(peer_draws())),
        benchmark="data/gpt items",
        peer=PEER,
        case={"samples": SAMPLES, "sequence_length": LENGTH, "batch": BATCH},
        limit=0.25,
    )


if __name__ == "__main__":
    main()
