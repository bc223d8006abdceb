"""Packs hold whole conversations, each once an epoch, and no label crosses to another one."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablocks_core.data import BlendedDataset, Loader, Split, first_fit_decreasing
from megablocks_core.data.instructions import PackedConversations

from .packs import check_sample, write

LENGTHS = [3, 9, 1, 4, 12, 6, 2, 2, 5, 7, 8, 3]
LEARNT = [[(n * 7 + at) % 3 > 0 for at in range(length)] for n, length in enumerate(LENGTHS)]


@pytest.fixture
def chats(tmp_path):
    return write(tmp_path / "x", LENGTHS, [[int(one) for one in mask] for mask in LEARNT])


@settings(max_examples=40)  # each writes files
@given(
    documents=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12
    ),
    length=st.integers(2, 16),
    too_long=st.sampled_from(["truncate", "drop"]),
)
def test_samples_are_the_packs_of_a_plain_loop(tmp_path_factory, documents, length, too_long):
    folder = tmp_path_factory.mktemp("x")
    indexed = write(folder / "x", [len(mask) for mask in documents], documents)
    starts = np.cumsum([0] + [len(mask) for mask in documents]).tolist()
    fits = [len(mask) <= length or too_long == "truncate" for mask in documents]
    kept = [n for n, mask in enumerate(documents) if fits[n] and sum(mask[1:length])]
    if not kept:
        with pytest.raises(ValueError, match="must hold one with something to learn"):
            PackedConversations(indexed, length, seed=4, too_long=too_long)
        return
    dataset = PackedConversations(indexed, length, seed=4, too_long=too_long)
    sizes = [min(len(documents[n]), length) for n in kept]
    items, bounds = first_fit_decreasing(sizes, length)
    packs = [items[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]
    seen = []
    for sample in range(len(dataset)):
        places = dataset.locate(sample).documents
        pieces = []
        for number, start, stop in places:
            assert (start, stop) == (0, min(len(documents[number]), length))
            ids = [starts[number] + at + 1 for at in range(stop)]
            mask = documents[number][1:stop]
            pieces.append((ids, [*ids[1:], 0], [*mask, 0]))
        check_sample(dataset, sample, pieces, length)
        seen.append([kept.index(number) for number, _, _ in places])
    assert sorted(seen) == sorted(packs)
    long = [n for n, mask in enumerate(documents) if len(mask) > length]
    report = dataset.report
    assert report.conversations == len(kept)
    assert report.samples == len(packs)
    assert report.tokens == sum(sizes)
    assert report.truncated == len(set(long) & set(kept))
    assert report.tokens_cut == sum(len(documents[n]) - length for n in set(long) & set(kept))
    assert report.dropped == (len(long) if too_long == "drop" else 0)
    assert report.conversations + report.dropped + report.unlearnt == len(documents)


def test_epochs_have_each_pack_once_in_another_order(chats):
    dataset = PackedConversations(chats, 12, seed=0, num_samples=200)
    epoch = dataset.samples_per_epoch
    orders = [
        [str(dataset.locate(e * epoch + k).documents) for k in range(epoch)] for e in range(3)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    other = PackedConversations(chats, 12, seed=1)
    assert [str(other.locate(k).documents) for k in range(epoch)] != orders[0]
    assert other.fingerprint != dataset.fingerprint
    assert dataset.resized(7).fingerprint == dataset.fingerprint
    assert len(dataset.resized(7)) == 7


def test_a_loader_takes_them_and_resumes_by_one_integer(chats):
    dataset = PackedConversations(chats, 12, seed=0, num_samples=40)
    steps = list(Loader(dataset, global_batch_size=4, micro_batch_size=2))
    assert len(steps) == 10
    for number, step in enumerate(steps):
        assert step.num_tokens == sum(float(b["loss_mask"].sum()) for b in step.micro_batches)
        assert [b["tokens"].shape for b in step.micro_batches] == [(1, 24)] * 2
        resumed = Loader(
            pickle.loads(pickle.dumps(dataset)),
            global_batch_size=4,
            micro_batch_size=2,
            consumed=4 * number,
            workers=2,
        )
        again = next(resumed)
        for one, other in zip(step.micro_batches, again.micro_batches, strict=True):
            assert one["tokens"].equal(other["tokens"])
            assert one["cu_seqlens_host"] == other["cu_seqlens_host"]


def test_filling_is_a_document_without_an_id(chats):
    dataset = PackedConversations(chats, 16, seed=0)
    batch = dataset.batch(range(len(dataset)))
    bounds, ids = batch["cu_seqlens"], batch["document_ids"]
    filled = [batch["tokens"][0, start] == 0 for start in bounds[:-1]]
    assert 0 < sum(filled) < len(filled)
    assert [one == -1 for one in ids] == filled
    real = ids[ids >= 0].tolist()
    assert len(set(real)) == len(real)
    assert batch["max_seqlen"] == max(np.diff(bounds))


def test_they_blend(chats):
    parts = {
        "a": PackedConversations(chats, 12, seed=0),
        "b": PackedConversations(chats, 12, seed=1),
    }
    blend = BlendedDataset(parts, seed=2, weights={"a": 1, "b": 1}, num_samples=8)
    batch = blend.batch(range(8))
    assert batch["loss_mask"].sum() == blend.num_loss_tokens(range(8)) > 0


def test_a_split_holds_its_own(chats):
    dataset = PackedConversations(chats, 12, seed=0, split=Split("some", np.array([1, 4, 5])))
    found = {n for k in range(len(dataset)) for n, _, _ in dataset.locate(k).documents}
    assert found == {1, 4, 5}
    assert dataset.locate(0).source == "some"


def test_packs_of_a_lognormal_mix_are_within_two_hundredths_of_the_fewest(tmp_path):
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(6.0, 1.0, 5000)), 8, 20_000).astype(int)
    indexed = write(tmp_path / "x", lengths.tolist())
    for length in (2048, 4096, 8192):
        report = PackedConversations(indexed, length, seed=0).report
        assert report.lower_bound <= report.samples <= 1.02 * report.lower_bound
        assert report.tokens + report.tokens_cut == lengths.sum()
        assert report.truncated == (lengths > length).sum() > 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([0], {}, "sequence_length=0 must be at least 1"),
        ([12], {"seed": -1}, "seed=-1 must be"),
        ([12], {"too_long": "wrap"}, "too_long='wrap' must be one of truncate, drop"),
        ([12], {"num_samples": 0}, "num_samples=0 must be at least 1"),
        ([12], {"split": "train"}, "split='train' must be a Split"),
        ([1], {}, "must hold one with something to learn in sequence_length=1"),
    ],
)
def test_wrong_arguments_are_named(chats, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PackedConversations(chats, *arguments, **{"seed": 0, **options})


def test_other_datasets_and_samples_are_refused(chats, tmp_path):
    with pytest.raises(ValueError, match="must be an IndexedDataset"):
        PackedConversations("x", 12, seed=0)
    dataset = PackedConversations(chats, 12, seed=0)
    with pytest.raises(IndexError, match=f"samples 0 to 99 of {len(dataset)}"):
        dataset.batch([0, 99])
