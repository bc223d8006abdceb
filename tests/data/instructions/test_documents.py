"""Documents are cut only where they must be, and every token is in one sample of an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import Loader, Split
from megablocks_core.data.instructions import FillInTheMiddle, PackedDocuments

from .packs import check_sample, write

MIDDLE = FillInTheMiddle(5001, 5002, 5003, rate=0.6, seed=5)


@settings(max_examples=40)  # each writes files
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    length=st.integers(1, 16),
)
def test_an_epoch_has_each_token_once_and_no_needless_cut(tmp_path_factory, lengths, length):
    dataset = PackedDocuments(write(tmp_path_factory.mktemp("x") / "x", lengths), length, seed=0)
    starts = np.cumsum([0, *lengths]).tolist()
    seen, cuts = [], 0
    for sample in range(len(dataset)):
        pieces = []
        for number, start, stop in dataset.locate(sample).documents:
            ids = list(range(starts[number] + start + 1, starts[number] + stop + 1))
            followed = stop < lengths[number]
            label = ids[-1] + 1 if followed else 0
            pieces.append((ids, [*ids[1:], label], [1] * (len(ids) - 1) + [int(followed)]))
            seen += ids
            cuts += followed
        check_sample(dataset, sample, pieces, length)
    assert sorted(seen) == list(range(1, sum(lengths) + 1))
    assert cuts == sum(max(-(-each // length) - 1, 0) for each in lengths)


def test_rearranged_documents_are_those_of_the_sample_and_come_back(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 40, 60).tolist()
    indexed = write(tmp_path / "x", lengths)
    dataset = PackedDocuments(indexed, 32, seed=0, fill_in_the_middle=MIDDLE, num_samples=150)
    starts = np.cumsum([0, *lengths]).tolist()
    epoch, moved = dataset.samples_per_epoch, 0
    for sample in range(epoch):
        pieces = []
        for nth, (number, start, stop) in enumerate(dataset.locate(sample).documents):
            plain = list(range(starts[number] + start + 1, starts[number] + stop + 1))
            ids = MIDDLE.tokens(plain, sample, nth).tolist()
            assert MIDDLE.undo(ids).tolist() == plain
            if ids == plain:
                followed = stop < lengths[number]
                labels = [*ids[1:], ids[-1] + 1 if followed else 0]
                pieces.append((ids, labels, [1] * (len(ids) - 1) + [int(followed)]))
            else:
                moved += 1
                pieces.append((ids, [*ids[1:], 0], [1] * (len(ids) - 1) + [0]))
        check_sample(dataset, sample, pieces, 32)
    assert moved > 20
    first, later = (
        {str(dataset[k]["tokens"].tolist()) for k in range(e * epoch, e * epoch + epoch)}
        for e in (0, 1)
    )
    assert len(first & later) < len(first) // 2, "drawn anew in each epoch"
    assert dataset.fingerprint != PackedDocuments(indexed, 32, seed=0).fingerprint


def test_workers_leave_no_trace(tmp_path):
    indexed = write(tmp_path / "x", [7, 30, 2, 11, 5, 9, 16] * 4)
    dataset = PackedDocuments(indexed, 24, seed=0, fill_in_the_middle=MIDDLE, num_samples=24)
    plain, threads = (
        [
            batch["tokens"].tolist()
            for step in Loader(dataset, global_batch_size=4, micro_batch_size=2, workers=workers)
            for batch in step.micro_batches
        ]
        for workers in (0, 3)
    )
    assert plain == threads
    resumed = Loader(dataset, global_batch_size=4, micro_batch_size=2, consumed=12)
    assert next(resumed).micro_batches[0]["tokens"].tolist() == plain[6]


def test_wrong_arguments_are_named(tmp_path):
    indexed = write(tmp_path / "x", [0, 5, 0])
    with pytest.raises(ValueError, match="sequence_length=3 must be above the 3 marks"):
        PackedDocuments(indexed, 3, seed=0, fill_in_the_middle=MIDDLE)
    with pytest.raises(ValueError, match="split 'none' must hold a token"):
        PackedDocuments(indexed, 3, seed=0, split=Split("none", range(2, 3)))
    with pytest.raises(ValueError, match="num_samples=0 must be"):
        PackedDocuments(indexed, 3, seed=0, num_samples=0)
