"""``tokenize`` end to end against the engine's own batch call over the same texts, on all cores.

Ours reads JSON lines, encodes, writes, syncs and publishes, its workers started and its engine
checked each time; the engine is handed a list of texts in memory. Also against the reference's fast
tool, which reads the same file and writes the same bytes, as it runs and without its 128 processes.
Each run has a new tokenizer, so that every pass is a first one: the caches of both engines grow
with what they have seen. A round is long and nothing is warmed, so there are five. awkward, which
takes a third of a second to load, is loaded before: both sides of a round need it.
"""

import filecmp
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.data.peers import preprocess_fast
from benchmarks.timing import Times, report
from megablocks_core.data import IndexedDataset, standard_library
from megablocks_core.data.tokenize import tokenize

VOCABULARY, ROUNDS = 8000, 5
THREADS = len(os.sched_getaffinity(0))
# The rate of the engine that is promised.
LIMIT = round(1 / 0.7, 2)


def source_texts(max_bytes: int) -> list[str]:
    """Python's library, then what is installed, up to so many bytes; a file is a text."""
    texts, size = [], 0
    for path in _sources():
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if not text or "\0" in text:
            continue
        size += len(text.encode())
        if size > max_bytes:
            break
        texts.append(text)
    return texts


def _sources() -> Iterator[Path]:
    yield from standard_library()
    yield from sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))


def train(texts: list[str], path: Path) -> None:
    """A byte-level BPE tokenizer, split as GPT-2's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:300], trainer)
    tokenizer.save(str(path))


def hf_batch(path: Path, texts: list[str]) -> tuple[float, int]:
    """Seconds of one batch call of Hugging Face's engine, and how many ids it gave."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    start = time.perf_counter()
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    seconds = time.perf_counter() - start
    return seconds, sum(len(encoding.ids) for encoding in found)


def gigatoken_batch(path: Path, texts: list[str]) -> tuple[float, int]:
    """The same of gigatoken."""
    from gigatoken import Tokenizer

    tokenizer = Tokenizer(path)
    start = time.perf_counter()
    found: Any = tokenizer.encode_batch(texts, parallel=True)
    seconds = time.perf_counter() - start
    return seconds, int(found.layout.offsets.data[-1])


def fast_tool(path: Path, _: list[str], *, processes: int) -> tuple[float, int]:
    """The same of the reference's tool, which reads our file; what it writes is what ours does."""
    folder = path.parent
    ours, theirs = folder / "out", folder / "theirs"
    found = preprocess_fast(path, folder / "texts.jsonl", theirs, processes=processes)
    if ours.with_suffix(".bin").exists():
        for ending in (".bin", ".idx"):
            assert filecmp.cmp(f"{ours}{ending}", f"{theirs}{ending}", shallow=False)
    return found


def bench(
    engine: str,
    batch: Callable[[Path, list[str]], tuple[float, int]],
    texts: list[str],
    folder: Path,
    *,
    peer: str = "",
    limit: float | None = None,
) -> None:
    """Both in turns, over the same texts."""
    lines, tokenizer = folder / "texts.jsonl", folder / "tokenizer.json"
    with open(lines, "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")

    def ours() -> float:
        start = time.perf_counter()
        tokenize(
            [lines], folder / "out", tokenizer=f"hf:{tokenizer}", engine=engine, overwrite=True
        )
        return time.perf_counter() - start

    times = Times([], [])
    for index in range(ROUNDS):
        for side in (0, 1) if index % 2 else (1, 0):
            if side:
                seconds, tokens = batch(tokenizer, texts)
                times.peer.append(seconds)
            else:
                times.ours.append(ours())
                dataset = IndexedDataset(folder / "out")
        assert (dataset.num_tokens, dataset.num_documents) == (tokens, len(texts))
    dataset.verify()
    nbytes = sum(len(text.encode()) for text in texts)
    report(
        times,
        benchmark="data/tokenize",
        peer=peer or f"batch call of {engine}",
        case={"megabytes": round(nbytes / 1e6), "texts": len(texts), "vocabulary": VOCABULARY},
        limit=limit,
        threads=THREADS,
    )


def main() -> None:
    """Print one JSON line an engine."""
    os.environ.update(RAYON_NUM_THREADS=str(THREADS), TOKENIZERS_PARALLELISM="true")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(source_texts(8_000_000), folder / "tokenizer.json")
        bench("hf", hf_batch, source_texts(8_000_000), folder, limit=LIMIT)
        import_module("awkward")
        texts = source_texts(200_000_000)
        bench("gigatoken", gigatoken_batch, texts, folder, limit=LIMIT)
        for processes, limit in ((128, 1.0), (1, None)):
            batch = partial(fast_tool, processes=processes)
            peer = f"preprocess_data_fast, {processes} processes"
            bench("gigatoken", batch, texts, folder, peer=peer, limit=limit)


if __name__ == "__main__":
    main()
