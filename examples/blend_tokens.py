"""Mix two corpora, change the mix in the middle of a run, and go on from there.

    python examples/blend_tokens.py

Two packages of Python's own source stand for the corpora.
"""

import email
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from megablocks_core.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    Loader,
    read_texts,
    write_byte_documents,
)

LENGTH, BATCH, CHANGE = 64, 10, 100  # tokens a sample, samples a step, samples of the first mix


def main(folder: str) -> None:
    """Blend, count what each source gave, add a segment, resume."""
    sources = {}
    for seed, package in enumerate((json, email)):
        text = read_texts(str(Path(package.__file__).parent), suffixes=(".py",))
        write_byte_documents(text, f"{folder}/{package.__name__}")
        corpus = IndexedDataset(f"{folder}/{package.__name__}")
        sources[package.__name__] = GPTDataset(corpus, LENGTH, seed=seed)

    first = {"json": 1, "email": 4}
    blend = BlendedDataset(sources, weights=first, num_samples=200, seed=7)
    loader = Loader(blend, global_batch_size=BATCH, micro_batch_size=5)
    taken = [next(loader) for _ in range(CHANGE // BATCH)]
    print(f"{len(taken)} steps at 1 to 4: {_given(loader, range(len(taken)))}")

    # From sample 100 on it is half and half. Its past is the same, so the state fits.
    segments = [(0, first), (CHANGE, {"json": 1, "email": 1})]
    changed = BlendedDataset(sources, weights=segments, num_samples=200, seed=7)
    resumed = Loader(changed, global_batch_size=BATCH, micro_batch_size=5)
    resumed.load_state_dict(loader.state_dict())
    steps = range(CHANGE // BATCH, 200 // BATCH)
    print(f"{len(list(resumed))} steps at 1 to 1: {_given(resumed, steps)}")
    places = [str(place) for step in range(200 // BATCH) for place in resumed.locate(step)]
    print(f"samples that came twice: {len(places) - len(set(places))}")


def _given(loader: Loader, steps: range) -> dict[str, int]:
    """How many samples each source gave in some steps."""
    return dict(Counter(place.source for step in steps for place in loader.locate(step)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        try:
            main(scratch)
        except (ValueError, OSError) as error:
            sys.exit(str(error))
