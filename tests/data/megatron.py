"""Megatron-LM's own ``GPTDataset`` over a dataset of ours: an oracle, and a peer to time."""

from importlib import import_module
from typing import Any

import numpy as np


class Tokenizer:
    """All that it asks of one; no token is the padding's."""

    vocab_size, eod, eos, pad = 50_000, -2, -2, -1
    unique_identifiers = {}


def megatron_dataset(
    prefix, length, *, seed, num_samples, sequences, extra_token=True, drop_last=True
) -> Any:
    """Build the reference over a range of sequences; in memory, as it does for mock data."""
    core = "megatron.core.datasets"
    gpt, indexed, utils = (
        import_module(f"{core}.{name}") for name in ("gpt_dataset", "indexed_dataset", "utils")
    )
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=extra_token,
        drop_last_partial_validation_sequence=drop_last,
    )
    assert config.mock  # so nothing is cached
    indices = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    dataset = indexed.IndexedDataset(str(prefix), mmap=True)
    return gpt.GPTDataset(dataset, str(prefix), indices, num_samples, utils.Split.valid, config)
