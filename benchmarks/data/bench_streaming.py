"""Start-up and random reads against mosaicml-streaming and litdata.

20,000 samples of 4,097 uint16 tokens in each library's own format, in memory once written. A batch
is 64 random samples as one array [64, 4097] of int64. Start-up is opening the folder and reading
one sample, in a process that has imported both. Run it with the Python that
``tools/oracles.sh streaming`` prints; without the peers there is nothing to compare with.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.timing import report, take_turns
from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, gather_tokens

SAMPLES, LENGTH, BATCH = 20_000, 4097, 64
Open = Callable[[], Any]
Read = Callable[[Any, np.ndarray], np.ndarray]


def main() -> None:
    """Print one JSON line a case."""
    tokens = np.random.default_rng(0).integers(0, 50_000, (SAMPLES, LENGTH), dtype=np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        ours = write_ours(tokens, Path(folder) / "ours")
        for peer, write in (("mosaicml-streaming", write_mosaic), ("litdata", write_litdata)):
            try:
                theirs = write(tokens, f"{folder}/{peer}")
            except ModuleNotFoundError:
                continue
            compare(tokens, ours, theirs, peer)


def compare(
    tokens: np.ndarray, ours: tuple[Open, Read], theirs: tuple[Open, Read], peer: str
) -> None:
    """Start both, and read the same samples of both."""
    draws = np.random.default_rng(1).integers(0, SAMPLES, (1024, BATCH))
    turns = {"ours": 0, "theirs": 0}

    def start(side: tuple[Open, Read]) -> None:
        opener, read = side
        assert np.array_equal(read(opener(), np.array([17]))[0], tokens[17])

    def draw(name: str) -> np.ndarray:
        turns[name] += 1
        return draws[turns[name] % len(draws)]

    opened, peers = ours[0](), theirs[0]()
    for batch in draws[:4]:
        assert np.array_equal(ours[1](opened, batch), theirs[1](peers, batch))
    case = {"samples": SAMPLES, "tokens": LENGTH}
    report(
        take_turns(lambda: start(ours), lambda: start(theirs)),
        benchmark="data/streaming start",
        peer=peer,
        case=case,
    )
    report(
        take_turns(lambda: ours[1](opened, draw("ours")), lambda: theirs[1](peers, draw("theirs"))),
        benchmark="data/streaming reads",
        peer=peer,
        case={**case, "batch": BATCH},
    )


def write_ours(tokens: np.ndarray, prefix: Path) -> tuple[Open, Read]:
    """An indexed dataset, read by the gather that its batches use."""
    with IndexedDatasetBuilder(prefix, dtype=np.uint16) as builder:
        for sample in tokens:
            builder.add_document(sample)

    def read(dataset: IndexedDataset, samples: np.ndarray) -> np.ndarray:
        batch = np.empty((len(samples), LENGTH), np.int64)
        lengths = np.full(len(samples), LENGTH)
        gather_tokens(dataset.tokens, samples * LENGTH, lengths, out=batch.reshape(-1))
        return batch

    return lambda: IndexedDataset(prefix), read


def write_mosaic(tokens: np.ndarray, folder: str) -> tuple[Open, Read]:
    """Mosaic's shards, of one column."""
    _stub_torchvision()
    from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]

    with MDSWriter(out=folder, columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for sample in tokens:
            writer.write({"tokens": sample})

    def read(dataset: Any, samples: np.ndarray) -> np.ndarray:
        return np.stack([dataset[i]["tokens"] for i in samples.tolist()]).astype(np.int64)

    return lambda: StreamingDataset(local=folder, batch_size=BATCH), read


def write_litdata(tokens: np.ndarray, folder: str) -> tuple[Open, Read]:
    """Chunks of tokens, read in blocks."""
    import litdata  # pyright: ignore[reportMissingImports]
    from litdata.streaming import TokensLoader  # pyright: ignore[reportMissingImports]
    from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

    def loader() -> Any:
        return TokensLoader(block_size=LENGTH)

    writer = BinaryWriter(folder, chunk_bytes="64MB", item_loader=loader())
    for index, sample in enumerate(tokens):
        writer.add_item(index, torch.from_numpy(sample))
    writer.done()
    writer.merge()

    def read(dataset: Any, samples: np.ndarray) -> np.ndarray:
        items = [dataset[i].numpy() for i in samples.tolist()]
        return np.stack(items).astype(np.int64)

    return lambda: litdata.StreamingDataset(folder, item_loader=loader()), read


def _stub_torchvision() -> None:
    """Mosaic imports it for its image datasets alone."""
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.VisionDataset, module.to_tensor = object, None  # pyright: ignore
        module.functional = module.transforms = module.datasets = module  # pyright: ignore
        sys.modules.setdefault(module.__name__, module)


if __name__ == "__main__":
    main()
