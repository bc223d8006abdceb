"""Write text as an indexed dataset, read it back, and take samples in training order.

    python examples/read_tokens.py [FILE_OR_FOLDER ...]

Without an argument it reads the source of Python's own ``json`` package.
"""

import json
import sys
import tempfile
from pathlib import Path

from megablocks_core.data import (
    GPTDataset,
    IndexedDataset,
    Loader,
    decode_bytes,
    read_texts,
    split_documents,
    write_byte_documents,
)


def main(paths: list[str], folder: str) -> None:
    """Write, read, split, shuffle, and resume in the middle."""
    prefix = Path(folder) / "corpus"
    counts = write_byte_documents(read_texts(*paths, suffixes=(".py", ".txt", ".md")), prefix)
    print(f"wrote {counts.documents} documents, {counts.tokens} tokens")

    corpus = IndexedDataset(prefix)
    print(f"first document begins {decode_bytes(corpus[0][:40])!r}")

    splits = split_documents(corpus.num_documents, "80,20", names=("train", "valid"))
    train = GPTDataset(corpus, 128, seed=1234, split=splits["train"], num_samples=400)
    print(f"{train.samples_per_epoch} samples an epoch, {len(train)} asked for")

    loader = Loader(train, global_batch_size=8, micro_batch_size=4)
    steps = [next(loader) for _ in range(3)]
    first = steps[0].micro_batches[0]
    print(f"a step: {len(steps[0].micro_batches)} micro-batches of {first['tokens'].shape[1]}")
    print(f"        {steps[0].num_tokens} loss tokens, documents end at {first['cu_seqlens']}")

    # The whole state of the data is one integer; another micro-batch changes nothing.
    resumed = Loader(train, global_batch_size=8, micro_batch_size=8, consumed=16)
    tokens = next(resumed).micro_batches[0]["tokens"].flatten().tolist()
    before = [t for batch in steps[2].micro_batches for t in batch["tokens"].flatten().tolist()]
    print(f"resumed at sample 16 with other micro-batches: same tokens {tokens == before}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        try:
            main(sys.argv[1:] or [str(Path(json.__file__).parent)], scratch)
        except (ValueError, OSError) as error:
            sys.exit(str(error))
