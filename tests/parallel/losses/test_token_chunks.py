"""Chunks hold every token that counts once, on all ranks the same ones at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.groups import Group, chunk_slice
from megablocks_core.parallel.losses.token_chunks import chunk_tokens


@given(
    shape=st.sampled_from([(0,), (1,), (7,), (2, 5), (3, 0), (2, 3, 4)]),
    length=st.integers(1, 9),
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 3),
)
def test_every_token_that_counts_is_in_one_chunk(shape, length, size, seed):
    counts = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    places = torch.arange(counts.numel())
    plans = [
        chunk_tokens(counts, length, cut=Group(tuple(range(size)), rank=rank))
        for rank in range(size)
    ]
    assert len({len(plan) for plan in plans}) == 1
    for chunks in zip(*plans, strict=True):
        assert 0 < len(chunks[0].places) <= max(length, size)
        pieces = chunks[0].places.split(chunks[0].sizes)
        for rank, (chunk, piece) in enumerate(zip(chunks, pieces, strict=True)):
            assert torch.equal(chunk.places, chunks[0].places) and chunk.sizes == chunks[0].sizes
            # This rank's tokens, by their place among its own, stand there among all.
            own = places.view(shape)[..., chunk_slice(shape[-1], size, rank)].reshape(-1)
            assert torch.equal(own[chunk.own], piece)
    every = torch.cat([chunk.places for chunk in plans[0]] or [places[:0]])
    assert torch.equal(every.sort().values, places[counts.flatten()])


def test_a_single_token_without_a_dimension():
    (chunk,) = chunk_tokens(torch.tensor(True), 8, cut=Group())
    assert chunk.own.tolist() == chunk.places.tolist() == [0]
    assert chunk_tokens(torch.tensor(False), 8, cut=Group()) == []
