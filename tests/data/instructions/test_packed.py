"""What packed datasets share is the same for samples alone, in batches and from far away."""

import numpy as np
import pytest

from megablocks_core.data.instructions import PackedConversations, PackedDocuments

from .packs import write

LENGTHS = [3, 9, 1, 4, 12, 6, 2, 2, 5, 7, 8, 3]


@pytest.mark.parametrize("kind", [PackedConversations, PackedDocuments])
def test_a_batch_is_its_samples_end_to_end(tmp_path, kind):
    dataset = kind(write(tmp_path / "x", LENGTHS), 10, seed=0, num_samples=30)
    batch = dataset.batch([3, 1, 17, 3])
    alone = [dataset[sample] for sample in (3, 1, 17, 3)]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert batch[name].tolist() == [np.concatenate([each[name] for each in alone]).tolist()]
        assert batch[name].dtype == alone[0][name].dtype
    bounds = [0]
    for number, each in enumerate(alone):
        bounds += (each["cu_seqlens"][1:] + number * 10).tolist()
    assert batch["cu_seqlens"].tolist() == batch["cu_seqlens_host"] == bounds
    assert batch["sample_ids"].tolist() == [3, 1, 17, 3]
    assert dataset.num_loss_tokens([3, 1, 17, 3]) == batch["loss_mask"].sum()


@pytest.mark.parametrize("kind", [PackedConversations, PackedDocuments])
def test_tokens_that_are_far_away_are_read_alike(tmp_path, kind):
    indexed = write(tmp_path / "x", LENGTHS, [[int(n % 3 > 0) for n in range(k)] for k in LENGTHS])
    remote = type(indexed)(f"file://{tmp_path / 'x'}")
    here, there = (kind(each, 10, seed=0) for each in (indexed, remote))
    assert here.fingerprint == there.fingerprint
    for name in ("labels", "loss_mask"):
        assert here.batch([0, 2])[name].tolist() == there.batch([0, 2])[name].tolist()


def test_no_samples_are_an_empty_batch(tmp_path):
    dataset = PackedDocuments(write(tmp_path / "x", LENGTHS), 10, seed=0)
    assert dataset.batch([])["tokens"].shape == (1, 0)
    assert dataset.num_loss_tokens([]) == 0
