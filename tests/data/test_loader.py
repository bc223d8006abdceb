"""A global batch does not depend on who reads it, and one number resumes it anywhere."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import GPTDataset, Loader
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
