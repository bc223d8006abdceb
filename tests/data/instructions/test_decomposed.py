"""Pieces are powers of two, steps have one length, and no piece comes twice in an epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import Loader
from megablocks_core.data.instructions import DecomposedDocuments
from megablocks_core.data.instructions.curricula import KINDS

from .packs import check_sample, write


def plain_pieces(lengths, longest, shortest):
    """(document, offset, length) of all pieces."""
    pieces = []
    for document, left in enumerate(lengths):
        offset, length = 0, longest
        while length >= shortest:
            while left >= length:
                pieces.append((document, offset, length))
                offset, left = offset + length, left - length
            length //= 2
    return pieces


@settings(max_examples=40)  # each writes files
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=12),
    longest=st.sampled_from([4, 8, 16]),
    shortest=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
)
def test_samples_are_pieces_of_one_length(
    tmp_path_factory, lengths, longest, shortest, batch, kind
):
    pieces = plain_pieces(lengths, longest, shortest)
    counts = Counter(length for _, _, length in pieces)
    steps = {length: n * length // (longest * batch) for length, n in counts.items()}
    steps = {length: n for length, n in steps.items() if n}
    indexed = write(tmp_path_factory.mktemp("x") / "x", lengths)
    options = {"shortest": shortest, "global_batch_size": batch, "kind": kind, "seed": 3}
    if not steps:
        with pytest.raises(ValueError, match="must hold the .* tokens of a step"):
            DecomposedDocuments(indexed, longest, **options)
        return
    dataset = DecomposedDocuments(indexed, longest, **options)
    assert dataset.steps == steps
    assert len(dataset) == batch * sum(steps.values())
    assert dataset.tokens_left_out == sum(lengths) - len(dataset) * longest
    starts = np.cumsum([0, *lengths]).tolist()
    seen, by_step = [], []
    for sample in range(len(dataset)):
        places = dataset.locate(sample).documents
        expected = []
        for document, start, stop in places:
            ids = list(range(starts[document] + start + 1, starts[document] + stop + 1))
            followed = stop < lengths[document]
            label = ids[-1] + 1 if followed else 0
            expected.append((ids, [*ids[1:], label], [1] * (len(ids) - 1) + [int(followed)]))
        check_sample(dataset, sample, expected, longest)
        assert sum(stop - start for _, start, stop in places) == longest
        (length,) = {stop - start for _, start, stop in places}
        seen += [(document, start, stop - start) for document, start, stop in places]
        by_step.append(length)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(pieces)
    steps_found = np.array(by_step).reshape(-1, batch)
    assert (steps_found == steps_found[:, :1]).all()
    assert Counter(steps_found[:, 0].tolist()) == steps


def test_epochs_differ_and_a_loader_resumes(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 90, 120).tolist()
    dataset = DecomposedDocuments(
        write(tmp_path / "x", lengths),
        32,
        shortest=4,
        global_batch_size=2,
        kind="grow-p2",
        seed=0,
        num_samples=400,
    )
    epoch = dataset.samples_per_epoch
    first, later = ([dataset.locate(e * epoch + k) for k in range(epoch)] for e in (0, 1))
    assert {str(place) for place in first} != {str(place) for place in later}
    lasting = [np.mean([len(place.documents) for place in part]) for part in (first, later)]
    assert lasting[0] == lasting[1], "as many pieces"
    options = {"global_batch_size": 2, "micro_batch_size": 1}
    steps = list(Loader(dataset, **options))
    again = next(Loader(dataset, consumed=2 * 41, workers=2, **options))
    for one, other in zip(steps[41].micro_batches, again.micro_batches, strict=True):
        assert one["tokens"].equal(other["tokens"])
    lengths_seen = [{b["max_seqlen"] for b in step.micro_batches} for step in steps]
    assert all(len(found) == 1 for found in lengths_seen)
    assert {step.micro_batches[0]["tokens"].numel() for step in steps} == {32}


def test_the_fingerprint_knows_what_decides(tmp_path):
    indexed = write(tmp_path / "x", [40, 50, 60])
    plain = {"shortest": 4, "global_batch_size": 1, "kind": "natural", "seed": 0, "cycles": 1}
    changes = [{}, {"shortest": 8}, {"global_batch_size": 2}, {"kind": "grow-p2"}, {"cycles": 2}]
    found = {DecomposedDocuments(indexed, 16, **plain, **{}).fingerprint}
    for change in changes:
        found.add(DecomposedDocuments(indexed, 16, **{**plain, **change}).fingerprint)
    assert len(found) == len(changes)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (12, {}, "sequence_length=12 must be a power of two"),
        (16, {"shortest": 3}, "shortest=3 must be a power of two"),
        (16, {"shortest": 32}, "shortest=32 must be between 1 and 16"),
        (16, {"global_batch_size": 0}, "global_batch_size=0 must be"),
        (16, {"kind": "grow"}, "kind='grow' must be one of"),
        (16, {"cycles": 0}, "cycles=0 must be"),
        (64, {}, "must hold the 64 tokens of a step in documents of at least 4"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, length, options, message):
    plain = {"shortest": 4, "global_batch_size": 1, "kind": "natural", "seed": 0}
    with pytest.raises(ValueError, match=message):
        DecomposedDocuments(write(tmp_path / "x", [20, 30]), length, **{**plain, **options})
