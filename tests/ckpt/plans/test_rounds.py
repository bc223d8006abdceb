"""Rounds are bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.ckpt.plans.rounds import Rounds

JOBS = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 4), st.integers(0, 15), min_size=1), st.integers(0, 3))
)


@given(JOBS)
def test_a_rank_has_a_bucket_or_one_job_in_a_round(jobs):
    rounds = Rounds(5, limit=10)
    loads: dict[tuple[int, int], list[int]] = {}
    for needs, first in jobs:
        number = rounds.place(np.array(list(needs)), np.array(list(needs.values())), first=first)
        assert first <= number < len(rounds)
        for rank, nbytes in needs.items():
            if nbytes:
                loads.setdefault((number, rank), []).append(nbytes)
    assert all(sum(load) <= 10 or len(load) == 1 for load in loads.values())


def test_the_first_round_with_room_is_taken():
    rounds = Rounds(2, limit=10)
    places = [((0, 6), 0), ((0, 6), 0), ((1, 9), 0), ((0, 4), 0), ((0, 1), 1), ((1, 99), 0)]
    found = [
        rounds.place(np.array([rank]), np.array([nbytes]), first=first)
        for (rank, nbytes), first in places
    ]
    assert found == [0, 1, 0, 0, 1, 1]
