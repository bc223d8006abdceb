"""A blend hands out whole samples of its sources in proportion to weights, and no more."""

import pickle
from math import ceil, inf

import numpy as np
import pytest

from megablocks_core.data import BlendedDataset, GPTDataset, Loader, Split
from megablocks_core.data.collate import PER_TOKEN


@pytest.fixture
def source(corpus):
    """Return a function that makes a dataset of four-token samples whose tokens tell the source."""

    def make(number, num_samples, **options):
        first = number * 1000
        tokens = range(first, first + 4 * num_samples + 1)
        half = 2 * num_samples
        return GPTDataset(corpus([tokens[:half], tokens[half:]]), 4, seed=number, **options)

    return make


@pytest.fixture
def three(source):
    return {"web": source(1, 90), "code": source(2, 40), "math": source(3, 10)}


def firsts(blend):
    return [int(blend[k]["tokens"][0]) for k in range(len(blend))]


def test_a_blend_holds_the_samples_of_its_sources_in_their_order(three):
    blend = BlendedDataset(three, seed=1, weights={"web": 6, "code": 3, "math": 1})
    numbers, indices = blend.find(np.arange(len(blend)))
    for sample in range(len(blend)):
        name = list(three)[numbers[sample]]
        expected = three[name][int(indices[sample])]
        for key, value in blend[sample].items():
            assert np.array_equal(value, expected[key])
        place = three[name].locate(int(indices[sample]))
        assert blend.locate(sample) == (name, place.documents)
    assert blend.counts(len(blend)) == dict(zip(three, np.bincount(numbers).tolist(), strict=True))
    assert len(set(firsts(blend))) == len(blend)


def test_a_batch_is_its_samples_laid_end_to_end(three):
    blend = BlendedDataset(three, seed=1, weights={"web": 1, "code": 1})
    wanted = [17, 3, 3, 60, 0]
    batch = blend.batch(wanted)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert np.array_equal(batch[name], np.concatenate([blend[k][name] for k in wanted])[None])
        assert batch[name].dtype == three["web"].batch([0])[name].dtype
    bounds = [blend[k]["cu_seqlens"] + 4 * row for row, k in enumerate(wanted)]
    assert batch["cu_seqlens"].tolist() == sorted({b for part in bounds for b in part.tolist()})
    assert batch["cu_seqlens_host"] == batch["cu_seqlens"].tolist()
    assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()
    assert batch["sample_ids"].tolist() == wanted
    assert batch["document_ids"].tolist() == [
        k * 4 + first for k in wanted for first in blend[k]["cu_seqlens"][:-1].tolist()
    ]
    assert list(batch) == list(three["web"].batch([0]))
    assert blend.num_loss_tokens(wanted) == 20


def test_without_weights_every_source_is_used_up(three):
    blend = BlendedDataset(three, seed=1)
    assert len(blend) == 140
    assert blend.counts(140) == {"web": 90, "code": 40, "math": 10}
    starts = [int(source[k]["tokens"][0]) for source in three.values() for k in range(len(source))]
    assert sorted(firsts(blend)) == sorted(starts)
    half = blend.counts(70)
    assert all(abs(half[name] - len(source) / 2) <= 8 for name, source in three.items())


def test_by_default_a_blend_lasts_until_a_source_has_given_all(three):
    weights = {"web": 1, "code": 1, "math": 1}
    blend = BlendedDataset(three, seed=1, weights=weights)
    counts = blend.counts(len(blend))
    assert counts["math"] == 10
    assert max(counts.values()) <= 40
    with pytest.raises(ValueError, match="source 'math' is asked for 11 samples, .* at most 10"):
        BlendedDataset(three, seed=1, weights=weights, num_samples=len(blend) + 1)


def test_a_source_repeats_itself_only_as_often_as_allowed(three):
    weights = {"web": 1, "math": 1}
    blend = BlendedDataset(
        three, seed=2, weights=weights, num_samples=50, max_repetition={"math": 2.6}
    )
    asked = blend.counts(50)["math"]
    assert 20 < asked <= 26
    assert len(three["math"]) == 10  # the caller's stays as it was
    seen = [t for t in firsts(blend) if t >= 3000]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(3000, 3040, 4))
    assert seen[:10] != seen[10:20]
    with pytest.raises(ValueError, match="source 'math' is asked for .* at most 20"):
        BlendedDataset(three, seed=1, weights=weights, num_samples=60, max_repetition=2)


def test_segments_change_the_weights_and_no_source_repeats_or_skips(three):
    segments = [(0, {"web": 1}), (30, {"web": 1, "code": 1}), (70, {"code": 1, "math": 1})]
    blend = BlendedDataset(three, seed=5, weights=segments, num_samples=90)
    numbers, indices = blend.find(np.arange(90))
    assert set(numbers[:30]) == {0}
    assert set(numbers[30:70]) == {0, 1}
    assert set(numbers[70:]) == {1, 2}
    for number in range(3):
        assert indices[numbers == number].tolist() == list(range((numbers == number).sum()))
    counts = blend.counts(90)
    assert counts["web"] + counts["code"] + counts["math"] == 90


def test_a_segment_may_be_added_where_a_run_stands_and_the_past_may_not_change(source):
    sources = {"web": source(1, 90), "code": source(2, 40)}
    cut = {"global_batch_size": 5, "micro_batch_size": 5}
    weights = {"web": 2, "code": 1}
    run = Loader(BlendedDataset(sources, seed=1, weights=weights, num_samples=60), **cut)
    seen = [next(run).micro_batches[0]["tokens"][0, ::4].tolist() for _ in range(4)]
    state = run.state_dict()
    assert state["consumed"] == 20

    more = {**sources, "math": source(3, 30)}
    edited = [(0, weights), (20, {"code": 1, "math": 2})]
    again = Loader(BlendedDataset(more, seed=1, weights=edited, num_samples=60), **cut)
    again.load_state_dict(state)
    rest = [step.micro_batches[0]["tokens"][0, ::4].tolist() for step in again]
    everything = [token for step in seen + rest for token in step]
    assert len(everything) == len(set(everything)) == 60
    code = [token for token in everything if 2000 <= token < 3000]
    assert code == [int(sources["code"][k]["tokens"][0]) for k in range(len(code))]

    for other in ([(0, {"web": 1, "code": 1})], [(0, weights), (19, {"code": 1})]):
        changed = Loader(BlendedDataset(more, seed=1, weights=other, num_samples=40), **cut)
        with pytest.raises(ValueError, match="recipe='.*' of the state must be '.*'"):
            changed.load_state_dict(state)


def test_f_141_the_stage_is_that_of_the_step_also_after_a_resume(three):
    """Stages from steps 0 and 10 of batches of 4; the case numbers its steps from 1."""
    stages = [(0, {"web": 1}), (40, {"code": 1})]
    blend = BlendedDataset(three, seed=1, weights=stages, num_samples=52)
    whole = Loader(blend, global_batch_size=4, micro_batch_size=4)
    used = [{place.source for place in whole.locate(step)} for step in (4, 9, 10, 12)]
    assert used == [{"web"}, {"web"}, {"code"}, {"code"}]
    steps = [step.micro_batches[0]["tokens"].tolist() for step in whole]
    resumed = Loader(blend, global_batch_size=4, micro_batch_size=4, consumed=40)
    assert [step.micro_batches[0]["tokens"].tolist() for step in resumed] == steps[10:]


def test_the_order_of_the_reference(source):
    sources = {"a": source(1, 60), "b": source(2, 30)}
    blend = BlendedDataset(
        sources, seed=0, weights={"a": 0.7, "b": 0.3}, num_samples=80, order="megatron"
    )
    counts = np.zeros(2)
    for sample in range(80):
        chosen = int((np.array([0.7, 0.3]) * max(sample, 1) - counts).argmax())
        number, index = blend.find(np.array([sample]))
        assert (number[0], index[0]) == (chosen, counts[chosen])
        counts[chosen] += 1
    every = BlendedDataset(sources, seed=0, order="megatron")
    assert every.counts(len(every)) == {"a": 60, "b": 30}


@pytest.mark.parametrize("weights", [[0.995, 0.005], [0.1, 0.9], [0.333, 0.667]])
def test_a_blend_never_asks_for_more_than_there_is(source, weights):
    """The reference makes sources 0.5% longer than their share, and may still run over."""
    num_samples = 60
    sizes = [ceil(num_samples * weight * 1.005) for weight in weights]
    sources = {
        name: source(n, size) for n, (name, size) in enumerate(zip("ab", sizes, strict=True))
    }
    by_name = dict(zip("ab", weights, strict=True))
    try:
        blend = BlendedDataset(
            sources, seed=0, weights=by_name, num_samples=num_samples, order="megatron"
        )
    except ValueError as error:
        assert "is asked for" in str(error)
    else:
        assert len(firsts(blend)) == num_samples


def test_the_fingerprint_tells_what_changes_the_samples(source):
    sources = {"a": source(1, 60), "b": source(2, 30)}
    plain = {"seed": 1, "weights": {"a": 1, "b": 1}}
    same = [plain, {**plain, "num_samples": 9}, {**plain, "max_repetition": 3}]
    others = [
        {**plain, "seed": 2},
        {**plain, "weights": {"a": 2, "b": 1}},
        {**plain, "weights": [(0, plain["weights"]), (9, {"a": 1})]},
        {**plain, "order": "megatron", "num_samples": 9},
        {"seed": 1},
    ]
    prints = [BlendedDataset(sources, **recipe).fingerprint for recipe in same + others]
    assert len(set(prints[:3])) == 1
    assert len(set(prints)) == 1 + len(others)
    swapped = {"a": source(1, 60), "b": source(4, 30)}
    assert BlendedDataset(swapped, **plain).fingerprint not in prints


def test_weights_of_numpy_are_the_numbers_they_are(three):
    plain = {"web": 6, "code": 3.5}
    numpy = {"web": np.int64(6), "code": np.float32(3.5)}
    one, other = (BlendedDataset(three, seed=1, weights=weights) for weights in (plain, numpy))
    assert one.fingerprint == other.fingerprint
    assert firsts(one) == firsts(other)


def test_blends_nest_and_pickle(three):
    inner = BlendedDataset(three, seed=1, weights={"web": 1, "code": 1})
    outer = BlendedDataset({"both": inner, "math": three["math"]}, seed=2, num_samples=20,
                           weights={"both": 3, "math": 1})  # fmt: skip
    again = pickle.loads(pickle.dumps(outer))
    assert firsts(again) == firsts(outer)
    assert {outer.locate(k).source for k in range(20)} == {"both/web", "both/code", "math"}
    with pytest.raises(IndexError, match="samples 20 to 20 of 20"):
        outer.batch([20])


def test_f_127_an_empty_source_is_refused_by_name(source, corpus):
    class Empty:
        sequence_length = 4

        def __len__(self):
            return 0

    empty: object = Empty()
    with pytest.raises(ValueError, match="source 'b' is empty"):
        BlendedDataset({"a": source(1, 9), "b": empty}, seed=1)  # pyright: ignore
    indexed = corpus([[1, 2, 3, 4, 5, 6]])
    with pytest.raises(ValueError, match=f"{indexed.prefix}: split 'valid' .* holds 0 tokens"):
        GPTDataset(indexed, 4, seed=1, split=Split("valid", range(1, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "random"}, "order='random' must be"),
        ({"num_samples": 0}, "num_samples=0 must be at least 1"),
        ({"weights": {"a": 1, "c": 1}}, r"weights name \['c'\], must name of \['a', 'b'\]"),
        ({"weights": {"a": -1, "b": 2}}, "weights: a=-1 must be .* 0 or more"),
        ({"weights": {"a": 0}}, "one above 0"),
        ({"weights": {"a": float("nan")}}, "finite"),
        ({"weights": []}, r"weights begin at samples \[\]"),
        ({"weights": [(5, {"a": 1})]}, r"weights begin at samples \[5\]"),
        ({"weights": [(0, {"a": 1}), (0, {"b": 1})]}, "must begin at 0 and increase"),
        ({"weights": [(0, {"a": 1}), (5, {"b": 1})], "order": "megatron"}, "same weights"),
        ({"weights": {"a": 1}, "order": "megatron"}, "num_samples=None must be a number"),
        ({"num_samples": 5}, "num_samples=5 must be left out without weights"),
        ({"weights": {"a": 1}, "max_repetition": {"c": 1}}, "max_repetition=.* of the sources"),
        ({"weights": {"a": 1}, "max_repetition": 0}, "max_repetition leaves"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        BlendedDataset({"a": source(1, 9), "b": source(2, 9)}, **{"seed": 0, **arguments})


def test_a_batch_of_many_sources_asks_and_searches_those_it_comes_from(monkeypatch):
    asked = []

    class Noting:
        sequence_length, fingerprint = 4, "same"

        def __init__(self, name):
            self.name = name

        def __len__(self):
            return 3

        def batch(self, samples):
            asked.append(self.name)
            return {
                **{name: np.full((1, 4 * len(samples)), self.name) for name in PER_TOKEN},
                "cu_seqlens": np.arange(len(samples) + 1) * 4,
            }

        def num_loss_tokens(self, samples):
            return 4 * len(samples)

    blend = BlendedDataset({str(n): Noting(n) for n in range(3000)}, seed=1)
    blend.find([5])  # so that the table of its block is there
    searches = []
    search = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda row: searches.append(1) or search(row))
    batch = blend.batch([5, 6, 7])
    assert len(searches) == 3
    assert batch["tokens"].reshape(3, 4)[:, 0].tolist() == blend.find([5, 6, 7])[0].tolist()
    assert len(asked) == 3
    assert blend.num_loss_tokens(range(64)) == 256


def test_without_a_bound_a_source_repeats_itself_for_ever(three):
    weights = dict.fromkeys(three, 1)
    endless = BlendedDataset(three, seed=1, weights=weights, max_repetition=inf)
    assert len(endless) >= 2**62
    assert endless[2**61]["tokens"].shape == (4,)
    unbounded = {"code": inf, "math": inf}
    once = BlendedDataset(three, seed=1, weights=weights, max_repetition=unbounded)
    assert once.counts(len(once))["web"] == 90


def test_a_weight_is_the_same_as_an_int_and_as_a_float(three):
    one, two = (
        BlendedDataset(three, seed=1, weights={"web": weight, "code": 0.5}) for weight in (2, 2.0)
    )
    assert one.fingerprint == two.fingerprint
