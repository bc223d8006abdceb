"""Documents laid out in chunks: each starts one, and tokens come back where they were."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.layers.ssm.functions.chunked.layout import lay_out, to_chunks, to_tokens
from tests.layers.ssm.functions.chunked.kinds import sums


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 8))
def test_documents_each_start_a_chunk(lengths, behind, size):
    length = sum(lengths) + behind
    documents = lay_out(sums(lengths), length=length, chunk_size=size)
    wanted = []
    start = 0
    for number, count in enumerate([*lengths, behind]):
        for offset in range(0, count, size):
            tokens = [start + offset + i for i in range(min(size, count - offset))]
            wanted.append((number, offset == 0, tokens))
        start += count
    room = -(length // -size) + len(lengths) + 1
    assert len(documents.first) == len(documents.document) == room
    filled = documents.filled.view(room, size)
    token = documents.token.view(room, size)
    for chunk, (number, first, tokens) in enumerate(wanted):
        assert (documents.document[chunk], documents.first[chunk]) == (number, first)
        assert token[chunk][filled[chunk]].tolist() == tokens
    assert not filled[len(wanted) :].any() and not documents.first[len(wanted) :].any()
    assert documents.empty.tolist() == [count == 0 for count in lengths]
    for number, count in enumerate(lengths):
        if count:
            chunks = [chunk for chunk, (owner, *_) in enumerate(wanted) if owner == number]
            assert documents.last[number] == chunks[-1]


@pytest.mark.parametrize("lengths", [None, [3, 0, 5], [0]])
@pytest.mark.parametrize("size", [1, 4, 50])
def test_tokens_come_back(lengths, size):
    length = 11 if lengths != [0] else 0
    documents = None if lengths is None else lay_out(sums(lengths), length=length, chunk_size=size)
    x = torch.rand(1, length, 2)
    chunks = to_chunks(x, size, documents)
    assert chunks.shape[2:] == (size, 2)
    assert torch.equal(to_tokens(chunks, length, documents), x)
    assert chunks.sum() == pytest.approx(x.sum().item(), rel=1e-5)  # and zeros elsewhere
