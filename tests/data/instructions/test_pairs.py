"""A pair is two documents, its answers, of which only the answers are learnt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import (
    IndexedDataset,
    IndexedDatasetBuilder,
    Loader,
    Split,
    split_documents,
)
from megablocks_core.data.instructions import PreferencePairs

from .packs import write

MASKS = [[0, 0, 1, 1], [0, 0, 1], [0, 1, 1, 1, 1, 1, 1], [0, 1], [0, 0, 0, 0, 0, 1], [0, 1, 1]]


@pytest.fixture
def indexed(tmp_path):
    return write(tmp_path / "x", [len(mask) for mask in MASKS], MASKS)


@settings(max_examples=40)  # each writes files
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=10),
    most=st.integers(1, 9) | st.none(),
    too_long=st.sampled_from(["truncate", "drop"]),
)
def test_equals_a_plain_loop(tmp_path_factory, masks, most, too_long):
    masks = masks[: len(masks) // 2 * 2]
    indexed = write(tmp_path_factory.mktemp("x") / "x", [len(mask) for mask in masks], masks)
    starts = np.cumsum([0] + [len(mask) for mask in masks]).tolist()
    cut = [mask[:most] for mask in masks]
    long = [any(len(m) > (most or 99) for m in masks[n : n + 2]) for n in range(0, len(masks), 2)]
    learnt = [all(sum(m[1:]) for m in cut[n : n + 2]) for n in range(0, len(masks), 2)]
    dropped = [one and too_long == "drop" for one in long]
    kept = [n for n in range(len(long)) if learnt[n] and not dropped[n]]
    options = {"seed": 1, "max_length": most, "too_long": too_long}
    if not kept:
        with pytest.raises(ValueError, match="must hold a pair with something to learn"):
            PreferencePairs(indexed, **options)
        return
    dataset = PreferencePairs(indexed, **options)
    report = dataset.report
    assert (report.pairs, report.dropped) == (len(kept), sum(dropped))
    assert report.pairs + report.dropped + report.unlearnt == len(long)
    assert report.truncated == sum(long[n] for n in kept)
    seen = []
    for sample in range(len(dataset)):
        places = dataset.locate(sample).documents
        seen.append(places[0][0] // 2)
        tokens, labels, mask = [], [], []
        for number, start, stop in places:
            assert (start, stop) == (0, len(cut[number]))
            ids = [starts[number] + at + 1 for at in range(stop)]
            tokens, labels = tokens + ids, [*labels, *ids[1:], 0]
            mask += [*cut[number][1:], 0]
        found = dataset[sample]
        assert found["tokens"].tolist() == tokens
        assert found["labels"].tolist() == labels
        assert found["loss_mask"].tolist() == mask
        assert dataset.num_loss_tokens([sample]) == sum(mask)
        assert found["cu_seqlens"].tolist() == [0, places[0][2], len(tokens)]
    assert sorted(seen) == kept


def test_a_batch_is_chosen_and_rejected_in_turn(indexed):
    dataset = PreferencePairs(indexed, seed=0, num_samples=9)
    batch = dataset.batch([4, 0])
    alone = [dataset[4], dataset[0]]
    assert batch["tokens"].tolist() == [np.concatenate([one["tokens"] for one in alone]).tolist()]
    assert len(batch["cu_seqlens"]) == 5
    assert batch["document_ids"].tolist() == [8, 9, 0, 1]
    firsts = batch["position_ids"][0][batch["cu_seqlens"][:-1]]
    assert firsts.tolist() == [0] * 4
    orders = [[dataset.locate(e * 3 + k).documents[0][0] for k in range(3)] for e in range(3)]
    assert {tuple(sorted(order)) for order in orders} == {(0, 2, 4)}


def test_a_loader_takes_them(indexed):
    dataset = PreferencePairs(indexed, seed=0, num_samples=12)
    for step in Loader(dataset, global_batch_size=3, micro_batch_size=2):
        assert step.num_tokens == sum(float(b["loss_mask"].sum()) for b in step.micro_batches)
    assert dataset.resized(4).fingerprint == dataset.fingerprint
    assert PreferencePairs(indexed, seed=1).fingerprint != dataset.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"too_long": "wrap"}, "too_long='wrap' must be one of truncate, drop"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"num_samples": 0}, "num_samples=0 must be"),
    ],
)
def test_wrong_arguments_are_named(indexed, options, message):
    with pytest.raises(ValueError, match=message):
        PreferencePairs(indexed, **{"seed": 0, **options})


def test_a_split_holds_its_own_pairs(indexed):
    parts = split_documents(3, "2,1", names=("train", "valid"))
    train, valid = (PreferencePairs(indexed, seed=0, split=part) for part in parts.values())
    assert (len(train), len(valid)) == (2, 1)
    assert {train.locate(k).documents[0][0] for k in range(2)} == {0, 2}
    assert valid.locate(0)[0] == "valid"
    assert valid.locate(0).documents[0][0] == 4
    assert train.fingerprint != valid.fingerprint
    with pytest.raises(ValueError, match="must hold a pair"):
        PreferencePairs(indexed, seed=0, split=Split("none", range(0)))
    with pytest.raises(ValueError, match="split='train' must be a Split"):
        PreferencePairs(indexed, seed=0, split="train")
    with pytest.raises(ValueError, match="must lie in 3 documents"):
        PreferencePairs(indexed, seed=0, split=Split("x", range(4)))


def test_documents_that_were_parted_are_refused(tmp_path):
    def write_pairs(prompts):
        with IndexedDatasetBuilder(
            tmp_path / "x", np.int32, multimodal=True, overwrite=True
        ) as builder:
            for prompt in prompts:
                builder.add_document([*prompt, 7, 7], [len(prompt), 2], [0, 1])
        return IndexedDataset(tmp_path / "x")

    one, other = list(range(20)), list(range(10, 40))
    border = [*one[:-1], 99]  # the last id of a prompt may join what follows
    assert len(PreferencePairs(write_pairs([one, border, other, other]), seed=0)) == 2
    with pytest.raises(ValueError, match="documents 2 and 3 begin with different prompts"):
        PreferencePairs(write_pairs([one, one, one, other, other, other]), seed=0)


def test_an_odd_number_of_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match="3 documents must be pairs"):
        PreferencePairs(write(tmp_path / "x", [1, 2, 3]), seed=0)
    with pytest.raises(ValueError, match="must be an IndexedDataset"):
        PreferencePairs("x", seed=0)
