"""A global batch does not depend on who reads it, and one number resumes it anywhere."""

import gc
import pickle
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megablocks_core.data import GPTDataset, Loader, Place, collate_packed
from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.testing import ranks


class Numbers:
    """A dataset whose batches say which samples they hold."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def batch(self, samples):
        return {"samples": samples.copy(), "max_seqlen": 1}

    def num_loss_tokens(self, samples):
        return int(samples.sum())


class Ranks:
    """A group as far as a loader looks at one."""

    def __init__(self, size, rank):
        self.size, self.rank = size, rank


def loader(length, *, dp=1, rank=0, **arguments) -> Loader:
    group: Any = Ranks(dp, rank)
    return Loader(Numbers(length), group=group, **arguments)


def samples(step):
    return [micro_batch["samples"].tolist() for micro_batch in step.micro_batches]


def test_f_131_resuming_with_another_number_of_ranks():
    def run(dp):
        sizes = {"global_batch_size": 8, "micro_batch_size": 2, "consumed": 8}
        return [[samples(step) for step in loader(24, dp=dp, rank=r, **sizes)] for r in range(dp)]

    two, four = run(2), run(4)
    assert two[0] == [[[8, 9], [12, 13]], [[16, 17], [20, 21]]]
    assert two[1] == [[[10, 11], [14, 15]], [[18, 19], [22, 23]]]
    assert four[0] == [[[8, 9]], [[16, 17]]]
    assert four[3] == [[[14, 15]], [[22, 23]]]
    for run_on in (two, four):
        for step, first in enumerate((8, 16)):
            union = [s for rank in run_on for micro in rank[step] for s in micro]
            assert sorted(union) == list(range(first, first + 8))


@given(
    micro=st.integers(1, 3),
    dp=st.integers(1, 4),
    repeats=st.integers(1, 3),
    length=st.integers(0, 100),
    consumed=st.integers(0, 100),
)
def test_f_131_any_cut_gives_every_sample_once(micro, dp, repeats, length, consumed):
    whole = micro * dp * repeats
    consumed = min(consumed, length)
    loaders = [
        loader(
            length, dp=dp, rank=rank, consumed=consumed, global_batch_size=whole,
            micro_batch_size=micro,
        )
        for rank in range(dp)
    ]  # fmt: skip
    num_steps = len(loaders[0])
    for i, steps in enumerate(zip(*loaders, strict=True)):
        first = consumed + i * whole
        union = [s for step in steps for batch in samples(step) for s in batch]
        assert sorted(union) == list(range(first, first + whole))
        assert {step.num_tokens for step in steps} == {sum(range(first, first + whole))}
        assert {len(step.micro_batches) for step in steps} == {repeats}
        assert {one.consumed for one in loaders} == {first + whole}
    assert loaders[0].consumed == consumed + num_steps * whole
    assert length - loaders[0].consumed < whole


def test_f_135_resuming_at_an_epoch_border(stream):
    indexed = stream([33])  # 8 samples of 4 tokens

    def starts(consumed):
        dataset = GPTDataset(indexed, 4, seed=5, num_samples=16)
        loader = Loader(dataset, global_batch_size=4, micro_batch_size=4, consumed=consumed)
        return [step.micro_batches[0]["tokens"].view(4, 4)[:, 0].tolist() for step in loader]

    unbroken = starts(0)
    assert len(unbroken) == 4
    assert starts(8) == unbroken[2:]
    first, second = unbroken[0] + unbroken[1], unbroken[2] + unbroken[3]
    assert sorted(first) == sorted(second) == list(range(0, 32, 4))
    assert first != second


def test_f_140_the_first_sample_after_loading_is_the_next_one():
    resumed = loader(20, global_batch_size=2, micro_batch_size=2, consumed=6)
    assert samples(next(resumed)) == [[6, 7]]
    validation = loader(20, global_batch_size=2, micro_batch_size=2)
    assert samples(next(validation)) == [[0, 1]]


def test_consumed_counts_the_steps_handed_out():
    whole = loader(20, global_batch_size=4, micro_batch_size=2)
    assert len(whole) == 5
    for step in whole:
        if samples(step)[0][0] == 8:
            break
    assert (whole.consumed, len(whole)) == (12, 2)
    rest = loader(20, global_batch_size=4, micro_batch_size=2, consumed=whole.consumed)
    assert [samples(s) for s in rest] == [samples(s) for s in whole]
    assert list(whole) == []  # never starts over


def test_another_batch_size_resumes_too():
    one = [s for step in loader(24, global_batch_size=8, micro_batch_size=2)
           for micro in samples(step) for s in micro]  # fmt: skip
    head = loader(24, global_batch_size=4, micro_batch_size=4)
    seen = [s for _ in range(3) for micro in samples(next(head)) for s in micro]
    tail = loader(24, global_batch_size=6, micro_batch_size=1, consumed=head.consumed)
    assert seen + [s for step in tail for micro in samples(step) for s in micro] == one


def test_num_tokens_is_the_sum_of_all_masks(stream):
    dataset = GPTDataset(stream([3, 1, 6, 4, 9, 2]), 4, seed=0, cross_document_loss=False)
    group: Any = [Ranks(2, rank) for rank in range(2)]
    loaders = [Loader(dataset, global_batch_size=4, micro_batch_size=1, group=g) for g in group]
    for steps in zip(*loaders, strict=True):
        masks = [batch["loss_mask"].sum().item() for s in steps for batch in s.micro_batches]
        assert {step.num_tokens for step in steps} == {int(sum(masks))}
        assert 0 < sum(masks) < 16


def test_micro_batches_are_tensors(stream):
    dataset = GPTDataset(stream([3, 6, 8]), 4, seed=0)
    step = next(Loader(dataset, global_batch_size=4, micro_batch_size=2, group=LOCAL))
    for i, micro in enumerate(step.micro_batches):
        plain = dataset.batch([2 * i, 2 * i + 1])
        assert list(micro) == list(plain)
        assert micro["max_seqlen"] == plain["max_seqlen"]
        for name in ("tokens", "labels", "position_ids", "loss_mask"):
            tensor = micro[name]
            assert isinstance(tensor, torch.Tensor)
            assert tensor.shape == (1, 8)
            assert tensor.dtype == (torch.float32 if name == "loss_mask" else torch.int64)
            assert np.array_equal(tensor.numpy(), plain[name])


@ranks(1, 2, 4)
def test_ranks_of_a_real_group_share_one_global_batch():
    dp = Mesh().group("dp")
    steps = list(Loader(Numbers(16), global_batch_size=8, micro_batch_size=1, group=dp))
    for first, step in zip((0, 8), steps, strict=True):
        mine = [s for micro in samples(step) for s in micro]
        everyone = dp.all_gather_object((mine, step.num_tokens))
        assert sorted(s for part, _ in everyone for s in part) == list(range(first, first + 8))
        assert {tokens for _, tokens in everyone} == {sum(range(first, first + 8))}


class Rows:
    """A dataset of four-token samples that hold their number."""

    sequence_length, fingerprint = 4, "rows"

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def batch(self, samples):
        return collate_packed([{**self[int(sample)], "sample_ids": [sample]} for sample in samples])

    def __getitem__(self, sample):
        return {"tokens": np.full(4, sample), "labels": np.full(4, sample)}

    def num_loss_tokens(self, samples):
        return 4 * len(samples)

    def locate(self, sample):
        return Place("rows", [(sample, 0, 4)])


def rows(length, *, dp=1, rank=0, **arguments) -> Loader:
    group: Any = Ranks(dp, rank)
    return Loader(Rows(length), group=group, **arguments)


def real(step):
    """Return the samples of a step that count, and how many only stand in."""
    ids = [int(n) for batch in step.micro_batches for n in batch["sample_ids"]]
    masks = [
        float(row) for batch in step.micro_batches for row in batch["loss_mask"].view(-1, 4).mean(1)
    ]
    assert set(masks) <= {0.0, 1.0}
    return [n for n, mask in zip(ids, masks, strict=True) if mask], masks.count(0.0)


@given(
    whole=st.integers(1, 17),
    micro=st.integers(1, 4),
    dp=st.sampled_from([1, 2, 3, 4, 8]),
    length=st.integers(0, 50),
    drop_last=st.booleans(),
)
def test_any_batch_goes_over_any_ranks(whole, micro, dp, length, drop_last):
    cut: dict[str, Any] = {"global_batch_size": whole, "micro_batch_size": micro}
    loaders = [rows(length, dp=dp, rank=r, drop_last=drop_last, **cut) for r in range(dp)]
    seen = []
    for steps in zip(*loaders, strict=True):
        counted = [real(step) for step in steps]
        samples = [n for mine, _ in counted for n in mine]
        shapes = [[tuple(b["tokens"].shape) for b in step.micro_batches] for step in steps]
        assert all(shape == shapes[0] for shape in shapes)
        assert set(shapes[0]) == {(1, 4 * micro)}
        assert len(samples) + sum(number for _, number in counted) == dp * micro * len(shapes[0])
        assert len(shapes[0]) == -(-len(samples) // (dp * micro))
        assert {step.num_tokens for step in steps} == {4 * len(samples)}
        seen += sorted(samples)
    assert seen == list(range(length - length % whole if drop_last else length))
    assert {loader.consumed for loader in loaders} == {len(seen)}


def test_a_stand_in_beside_real_samples_is_no_part_of_them(stream):
    dataset = GPTDataset(stream([3, 6, 1, 9, 4]), 4, seed=0)
    step = next(Loader(dataset, global_batch_size=3, micro_batch_size=2))
    plain, first = dataset.batch([2]), dataset.batch([0])
    last = step.micro_batches[1]
    assert last["tokens"].tolist() == [plain["tokens"][0].tolist() + first["tokens"][0].tolist()]
    assert last["loss_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    bounds = plain["cu_seqlens_host"] + [4 + bound for bound in first["cu_seqlens_host"][1:]]
    assert last["cu_seqlens"].tolist() == last["cu_seqlens_host"] == bounds
    assert list(last) == list(plain)
    assert step.num_tokens == 12


def test_batch_sizes_change_by_schedule():
    schedule = [(0, 2), (6, 4), (13, 3)]
    whole = rows(24, global_batch_size=schedule, micro_batch_size=1)
    assert len(whole) == 3 + 2 + 3
    starts, sizes = [], []
    for step in whole:
        samples, _ = real(step)
        starts.append(samples[0])
        sizes.append(len(samples))
    assert starts == [0, 2, 4, 6, 10, 14, 17, 20]
    assert sizes == [2, 2, 2, 4, 4, 3, 3, 3]
    resumed = rows(24, global_batch_size=schedule, micro_batch_size=2, consumed=10)
    assert resumed.step == 4
    assert [real(step)[0][0] for step in resumed] == starts[4:]


def test_sequence_lengths_change_by_schedule_and_every_token_comes_once(stream):
    dataset = GPTDataset(stream([3, 17, 6, 1, 9, 40, 21]), 8, seed=0)
    lengths = [(0, 2), (4, 4), (8, 8)]
    cut: dict[str, Any] = {"global_batch_size": 2, "micro_batch_size": 1}
    plain = [step.micro_batches for step in Loader(dataset, **cut)]
    steps = [step.micro_batches for step in Loader(dataset, sequence_length=lengths, **cut)]
    for number, (shorter, longer) in enumerate(zip(steps, plain, strict=True)):
        length = [2, 2, 4, 4, 8, 8][number]
        for cut_batch, batch in zip(shorter, longer, strict=True):
            for name in ("tokens", "labels", "loss_mask"):
                assert torch.equal(cut_batch[name], batch[name])
            bounds = cut_batch["cu_seqlens_host"]
            assert set(range(0, 9, length)) | set(batch["cu_seqlens_host"]) == set(bounds)
            assert cut_batch["max_seqlen"] <= length
            assert int(cut_batch["position_ids"].max()) < length
    with pytest.raises(ValueError, match="sequence_length=3 must divide the dataset's, 8"):
        Loader(dataset, sequence_length=[(0, 8), (4, 3)], **cut)


def test_skipped_steps_are_dropped_and_the_rest_stays():
    cut: dict[str, Any] = {"global_batch_size": 2, "micro_batch_size": 1}
    plain = [real(step)[0] for step in rows(24, **cut)]
    skipping = rows(24, skip=[(2, 4), (9, 10)], **cut)
    assert len(skipping) == 9
    assert [real(step)[0] for step in skipping] == plain[:2] + plain[4:9] + plain[10:]
    resumed = rows(24, skip=[(2, 4), (9, 10)], consumed=4, **cut)
    assert (resumed.step, len(resumed)) == (4, 7)
    assert [real(step)[0] for step in resumed] == plain[4:9] + plain[10:]
    assert resumed.consumed == 24


def test_places_are_those_of_the_samples_of_a_step():
    loader = rows(24, global_batch_size=[(0, 2), (6, 4)], micro_batch_size=1, skip=[(1, 3)])
    for step in range(7):
        first = 2 * step if step < 3 else 4 * step - 6
        size = 2 if step < 3 else 4
        documents = [place.documents[0][0] for place in loader.locate(step)]
        assert documents == list(range(first, first + size))
    with pytest.raises(IndexError, match="step 7 of 7"):
        loader.locate(7)
    with pytest.raises(IndexError, match="step -1 of 7"):
        loader.locate(-1)


def test_f_132_a_state_is_the_same_on_every_rank_and_loads_on_any_number():
    """Nothing in it is a rank's own: there is no file of rank 0 that could be mistaken for all."""
    cut: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1}
    two = [rows(24, dp=2, rank=rank, **cut) for rank in range(2)]
    for loader in two:
        next(loader)
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1] == {"consumed": 4, "recipe": "rows"}
    for dp in (1, 4):
        loaders = [rows(24, dp=dp, rank=rank, **cut) for rank in range(dp)]
        for loader in loaders:
            loader.load_state_dict(states[0])
        assert sorted(n for loader in loaders for n in real(next(loader))[0]) == [4, 5, 6, 7]


def test_f_132_the_state_of_another_recipe_is_refused_with_both_named(stream):
    cut: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 1}
    indexed = stream([60])
    one, two = (Loader(GPTDataset(indexed, 4, seed=seed), **cut) for seed in (1, 2))
    state = one.state_dict()
    with pytest.raises(ValueError, match=f"{state['recipe']}.*{two.state_dict()['recipe']}"):
        two.load_state_dict(state)
    next(one)
    again = Loader(GPTDataset(indexed, 4, seed=1, num_samples=99), **cut)
    again.load_state_dict(one.state_dict())
    assert again.consumed == 4
    with pytest.raises(ValueError, match="consumed=100 must be between 0 and 99"):
        again.load_state_dict({**state, "consumed": 100})


@pytest.mark.parametrize("workers", [0, 8])
def test_f_137_a_position_counts_samples_and_not_packs(workers):
    """Three samples a pack, four packs: the run goes on at sample 12."""
    cut: dict[str, Any] = {"global_batch_size": 3, "micro_batch_size": 3, "workers": workers}
    packs = rows(24, **cut)
    for _ in range(4):
        assert len(next(packs).micro_batches) == 1
    assert packs.state_dict()["consumed"] == 12
    resumed = rows(24, **cut)
    resumed.load_state_dict(packs.state_dict())
    assert real(next(resumed))[0] == [12, 13, 14]


@pytest.mark.parametrize("workers", [0, 3])
def test_f_140_a_state_moves_a_loader_that_has_begun(workers):
    loader = rows(20, global_batch_size=2, micro_batch_size=2, workers=workers)
    assert real(next(loader))[0] == [0, 1]
    loader.load_state_dict({"consumed": 6, "recipe": "rows"})
    assert real(next(loader))[0] == [6, 7]
    loader.consumed = 2
    assert [real(step)[0][0] for step in loader] == list(range(2, 20, 2))


def test_threads_work_ahead_and_change_nothing():
    cut: dict[str, Any] = {"global_batch_size": 3, "micro_batch_size": 2, "skip": [(1, 3)]}
    plain = [real(step) for step in rows(32, drop_last=False, **cut)]
    for workers, prefetch in ((1, 1), (2, 3), (4, 20)):
        loader = rows(32, drop_last=False, workers=workers, prefetch=prefetch, **cut)
        found = []
        for step in loader:
            found.append(real(step))
            if len(found) == 4:
                assert (loader.step, loader.consumed) == (6, 18)
        assert found == plain


def test_threads_end_when_the_loader_is_dropped():
    def own():
        return [t for t in threading.enumerate() if t.name.startswith("megablocks-data")]

    gc.collect()
    before = set(own())
    loader = rows(20, global_batch_size=2, micro_batch_size=2, workers=2, prefetch=8)
    next(loader)
    mine = set(own()) - before
    assert mine
    gc.disable()
    try:
        del loader
        for thread in mine:
            thread.join(10)
        assert not any(thread.is_alive() for thread in mine)
    finally:
        gc.enable()


def test_threads_make_no_step_that_is_skipped():
    class Noting(Rows):
        made: list[int] = []  # noqa: RUF012

        def num_loss_tokens(self, samples):
            self.made.append(int(samples[0]))
            return len(samples)

    loader = Loader(
        Noting(20), global_batch_size=2, micro_batch_size=2, skip=[(1, 3), (5, 8)], workers=1
    )
    assert len(list(loader)) == 5
    assert Noting.made == [0, 6, 8, 16, 18]


def test_an_error_on_a_thread_reaches_the_caller_and_the_step_may_be_tried_again():
    loader = rows(12, global_batch_size=2, micro_batch_size=2, workers=2)
    broken = loader.dataset.num_loss_tokens

    def fail(samples):
        raise OSError("the disk is gone")

    next(loader)
    loader.consumed = loader.consumed
    setattr(loader.dataset, "num_loss_tokens", fail)  # noqa: B010
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    assert loader.consumed == 2
    setattr(loader.dataset, "num_loss_tokens", broken)  # noqa: B010
    assert real(next(loader))[0] == [2, 3]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_data_loader_hands_out_the_same_steps(workers):
    """Also after threads have run in this process, which a forked worker does not have."""
    loader = rows(20, global_batch_size=2, micro_batch_size=1, skip=[(3, 5)], workers=2)
    assert real(next(loader))[0] == [0, 1]
    steps = iter(DataLoader(cast(Any, loader), batch_size=None, num_workers=workers))
    seen = [real(next(steps))[0] for _ in range(3)]
    assert seen == [[2, 3], [4, 5], [10, 11]]
    state = loader.state_dict(ahead=3)
    resumed = rows(20, global_batch_size=2, micro_batch_size=1, skip=[(3, 5)])
    resumed.load_state_dict(state)
    assert [real(step)[0] for step in resumed] == [real(step)[0] for step in steps]
    assert loader.consumed == 2
    with pytest.raises(IndexError, match="step 7 of the 7 that remain"):
        loader[7]


@pytest.mark.slow
def test_spawned_workers_hand_out_the_same_steps(stream):
    """They inherit nothing: all they know is what a loader pickles as."""
    dataset = GPTDataset(stream([30, 2, 41]), 4, seed=1, num_samples=40)
    loader = Loader(dataset, global_batch_size=4, micro_batch_size=2, workers=1)
    first = next(loader)
    plain = [first, *loader]
    loader.consumed = 0
    steps = DataLoader(
        cast(Any, loader), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    for step, other in zip(steps, plain, strict=True):
        for batch, same in zip(step.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(batch["tokens"], same["tokens"])


def test_pickles_without_its_threads():
    loader = rows(20, global_batch_size=2, micro_batch_size=1, workers=2)
    next(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert [real(step) for step in again] == [real(step) for step in loader]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0 must be at least 1"),
        ({"global_batch_size": []}, r"global_batch_size=\[\] must begin at sample 0"),
        ({"global_batch_size": [(1, 4)]}, "must begin at sample 0"),
        ({"global_batch_size": [(0, 4), (0, 8)]}, "go on in increasing order"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"skip": [(3, 3)]}, r"skip=\[\(3, 3\)\] must hold ranges"),
        ({"workers": -1}, "workers=-1 must be at least 0"),
        ({"prefetch": 0}, "prefetch=0 must be at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be at least 1"),
        ({"consumed": -1}, "consumed=-1 must be between 0 and 24"),
        ({"consumed": 25}, "consumed=25 must be between 0 and 24"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        loader(24, **{"global_batch_size": 8, "micro_batch_size": 2, **arguments})
