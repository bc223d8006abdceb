"""Inputs of every format, and a tokenizer that was trained on the spot."""

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard

from megablocks_core.data import IndexedDataset

END = "<|endoftext|>"


def some_texts(count, seed=0):
    """Texts of several scripts and lengths, some empty."""
    words = ["the", "of", "model", "data", "naïve", "Straße", "数据", "\U0001f600", "x = 1\n", "42"]
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.choice([0, 1, 3, 10, 40]))) for _ in range(count)]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The path of a tokenizer.json with byte-level BPE."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(some_texts(300, seed=9), trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def json_lines(texts, key="text"):
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()


def write_parquet(path, texts, key="text", rows=20):
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


@pytest.fixture
def corpus(tmp_path):
    """A folder with a file of each format, and the texts in their order."""
    folder = tmp_path / "corpus"
    (folder / "f").mkdir(parents=True)
    texts = [some_texts(60, seed) for seed in range(5)]
    (folder / "a.jsonl").write_bytes(json_lines(texts[0]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts[1])))
    compressor = zstandard.ZstdCompressor()
    (folder / "c.jsonl.zst").write_bytes(compressor.compress(json_lines(texts[2])))
    write_parquet(folder / "d.parquet", texts[3])
    (folder / "e.txt.gz").write_bytes(gzip.compress(" ".join(texts[4]).encode()))
    for index in range(12):
        (folder / "f" / f"{index:02}.txt").write_text(texts[4][index])
    plain = [*texts[0], *texts[1], *texts[2], *texts[3], " ".join(texts[4]), *texts[4][:12]]
    return folder, plain


def documents(prefix):
    """The documents of a dataset, every byte of it checked."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    return [document.tolist() for document in dataset]


def contents(prefix):
    """The bytes of the files that must be the same for the same input."""
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".hashes")]
