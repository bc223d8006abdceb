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
    step, _ = next(loader), next(loader)
    first = step.micro_batches[0]
    print(f"a step: {len(step.micro_batches)} micro-batches of {first['tokens'].shape[1]}")
    print(f"        {step.num_tokens} loss tokens, documents end at {first['cu_seqlens_host']}")
    source, documents = loader.locate(2)[0]
    print(f"the next sample: documents and tokens {documents} of split {source!r}")

    # The state is one integer and the name of the recipe; other micro-batches change nothing.
    resumed = Loader(train, global_batch_size=8, micro_batch_size=8, workers=2)
    resumed.load_state_dict(loader.state_dict())
    one, other = (
        [t for batch in next(each).micro_batches for t in batch["tokens"].flatten().tolist()]
        for each in (loader, resumed)
    )
    print(f"resumed at sample 16 with other micro-batches: same tokens {one == other}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        try:
            main(sys.argv[1:] or [str(Path(json.__file__).parent)], scratch)
        except (ValueError, OSError) as error:
            sys.exit(str(error))
