"""Small datasets, and a recipe of two of them."""

import json
import os
import signal

import numpy as np
import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder, write_byte_documents


def build(prefix, documents, dtype=np.uint16, **options):
    """A dataset of documents of one sequence each."""
    with IndexedDatasetBuilder(prefix, dtype=dtype, **options) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def contents(prefix):
    """The documents of a dataset, every byte of it checked."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    ends = [dataset.document_start(number) for number in range(dataset.num_documents + 1)]
    return [dataset.tokens[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def in_a_child(work):
    """Run ``work`` in a process of its own; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            status = 0
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def recipe_file(tmp_path):
    """A function that writes a recipe of two sources; what it is given is changed or added."""
    write_byte_documents(
        [f"page {n} of the web. " * (n % 9 + 1) for n in range(60)], tmp_path / "web"
    )
    write_byte_documents([f"def f{n}(x): return {n}\n" * 9 for n in range(30)], tmp_path / "code")

    def write(name="recipe.json", without=(), **changes):
        whole = {
            "sources": {
                "web": {"prefix": "web", "weight": 7},
                "code": {"prefix": "code", "weight": 3},
            },
            "sequence_length": 32,
            "global_batch_size": 4,
            "seed": 5,
            "steps": 40,
            **changes,
        }
        path = tmp_path / name
        path.write_text(json.dumps({key: whole[key] for key in whole if key not in without}))
        return path

    return write
