"""Megatron-LM's own ``GPTDataset`` over a dataset of ours: an oracle, and a peer to time."""

import numpy as np


class Tokenizer:
    """All that it asks of one; no token is the padding's."""

    vocab_size, eod, eos, pad = 50_000, -2, -2, -1
    unique_identifiers = {}


def megatron_dataset(
    prefix, length, *, seed, num_samples, sequences, extra_token=True, drop_last=True
):
    """Build the reference over a range of sequences; in memory, as it does for mock data."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
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
    dataset = IndexedDataset(str(prefix), mmap=True)
    return GPTDataset(dataset, str(prefix), indices, num_samples, Split.valid, config)
