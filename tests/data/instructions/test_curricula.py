"""Every length comes as often as asked, short ones earlier, with as many tokens in each step."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data import GPTDataset, Loader
from megablocks_core.data.instructions import length_curriculum, length_stages
from megablocks_core.data.instructions.curricula import KINDS

from .packs import write

EVEN = {128: 300, 256: 300, 512: 300, 1024: 300}


@given(
    kind=st.sampled_from(KINDS),
    steps=st.dictionaries(st.integers(1, 64), st.integers(0, 20), min_size=1, max_size=5),
    cycles=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_each_length_comes_as_often_as_asked(kind, steps, cycles, seed):
    if not any(steps.values()):
        with pytest.raises(ValueError, match="must hold at least one step"):
            length_curriculum(kind, steps, seed=seed)
        return
    found = length_curriculum(kind, steps, seed=seed, cycles=cycles)
    assert Counter(found.tolist()) == Counter({k: n for k, n in steps.items() if n})
    assert found.tolist() == length_curriculum(kind, steps, seed=seed, cycles=cycles).tolist()


def mean_place(lengths, length):
    return np.flatnonzero(lengths == length).mean() / len(lengths)


def test_short_lengths_come_early_as_the_odds_say():
    natural, linear, powers = (length_curriculum(kind, EVEN, seed=0) for kind in KINDS)
    assert all(abs(mean_place(natural, length) - 0.5) < 0.04 for length in EVEN)
    for grown in (linear, powers):
        places = [mean_place(grown, length) for length in EVEN]
        assert places == sorted(places)
    assert mean_place(powers, 128) < mean_place(linear, 128) < 0.45
    first = Counter(linear[:300].tolist())
    for length, odds in zip(EVEN, (0.4, 0.3, 0.2, 0.1), strict=True):
        assert abs(first[length] / 300 - odds) < 0.08
    first = Counter(powers[:300].tolist())
    for length, odds in zip(EVEN, (8 / 15, 4 / 15, 2 / 15, 1 / 15), strict=True):
        assert abs(first[length] / 300 - odds) < 0.08


def test_cycles_begin_again_with_short_lengths():
    found = length_curriculum("grow-p2", EVEN, seed=0, cycles=3).reshape(3, -1)
    for cycle in found:
        assert Counter(cycle.tolist()) == dict.fromkeys(EVEN, 100)
        assert mean_place(cycle, 128) < 0.3 < 0.7 < mean_place(cycle, 1024)


def test_a_loader_cuts_its_steps_by_them(tmp_path):
    dataset = GPTDataset(write(tmp_path / "x", [700, 900]), 32, seed=0)
    lengths = length_curriculum("grow-linear", {8: 4, 16: 4, 32: 3}, seed=1)
    stages = length_stages(lengths, global_batch_size=4)
    loader = Loader(dataset, global_batch_size=4, micro_batch_size=2, sequence_length=stages)
    for length, step in zip(lengths.tolist(), loader, strict=False):
        assert [int(batch["tokens"].numel()) for batch in step.micro_batches] == [64, 64]
        for batch in step.micro_batches:
            bounds = batch["cu_seqlens_host"]
            assert set(range(0, 65, length)) <= set(bounds)
            assert batch["max_seqlen"] <= length
    assert stages[0] == (0, int(lengths[0]))
    assert all(start % 4 == 0 for start, _ in stages)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["linear", {1: 1}], {}, "kind='linear' must be one of natural, grow-linear, grow-p2"),
        (["natural", [1]], {}, "must be numbers of steps by length"),
        (["natural", {0: 1}], {}, "steps: length=0 must be at least 1"),
        (["natural", {1: -1}], {}, "steps: number=-1 must be at least 0"),
        (["natural", {1: 1}], {"cycles": 0}, "cycles=0 must be at least 1"),
        (["natural", {1: 1}], {"seed": -1}, "seed=-1 must be"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        length_curriculum(*arguments, **{"seed": 0, **options})


def test_wrong_stages_are_named():
    with pytest.raises(ValueError, match="global_batch_size=0 must be at least 1"):
        length_stages([1], global_batch_size=0)
    with pytest.raises(ValueError, match="lengths=0 must be at least 1"):
        length_stages([0], global_batch_size=1)
