"""What packed samples must be, said plainly."""

import numpy as np

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder


def write(prefix, lengths, learnt=None):
    """Documents of running ids from 1 on, each one sequence, or cut by what is learnt."""
    next_id = 1
    with IndexedDatasetBuilder(
        prefix, np.int32, multimodal=learnt is not None, overwrite=True
    ) as builder:
        for number, length in enumerate(lengths):
            ids = range(next_id, next_id + length)
            next_id += length
            if learnt is None:
                builder.add_document(ids)
            else:
                mask = learnt[number]
                builder.add_document(ids, [1] * length, mask)
    return IndexedDataset(prefix)


def check_sample(dataset, sample, pieces, length):
    """A sample is these pieces end to end: (ids, labels or None, mask), and nothing else."""
    found = dataset[sample]
    tokens, labels, mask, positions, bounds = [], [], [], [], [0]
    for ids, targets, counts in pieces:
        tokens += ids
        labels += targets
        mask += counts
        positions += range(len(ids))
        bounds.append(len(tokens))
    left = length - len(tokens)
    assert left >= 0
    if left:
        tokens, labels, mask = tokens + [0] * left, labels + [0] * left, mask + [0] * left
        positions += range(left)
        bounds.append(length)
    assert found["tokens"].tolist() == tokens
    assert found["labels"].tolist() == labels
    assert found["loss_mask"].tolist() == mask
    assert found["position_ids"].tolist() == positions
    assert found["cu_seqlens"].tolist() == bounds
    assert dataset.num_loss_tokens([sample]) == sum(mask)
