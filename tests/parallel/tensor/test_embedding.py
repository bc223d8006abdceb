"""A vocabulary-parallel embedding has the outputs, gradients and traffic of one embedding."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Group, chunk_slice, gather_whole, whole_tensor
from megablocks_core.parallel.tensor.embedding import VocabParallelEmbedding
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _whole(num_embeddings, padding_idx=None):
    torch.manual_seed(0)
    return nn.Embedding(num_embeddings, 6, padding_idx=padding_idx).double()


# 13 rows over 4 ranks are 4, 4, 4, 1; 5 are 2, 2, 1, 0; 1 is 1, 0, 0, 0.
@ranks(1, 2, 4)
@pytest.mark.parametrize("num_embeddings", [16, 13, 5, 1])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_equals_one_embedding(num_embeddings, padding_idx, sequence_parallel):
    group = _world()
    whole = _whole(num_embeddings, padding_idx)
    part = VocabParallelEmbedding.from_embedding(
        whole, sequence_parallel=sequence_parallel, group=group
    )
    ids = torch.randint(num_embeddings, (2, 7))
    dy = torch.randn(2, 7, 6, dtype=torch.float64)
    tokens = slice(None)
    if sequence_parallel:
        tokens = chunk_slice(7, group.size, group.rank)

    y, expected = part(ids), whole(ids)
    y.backward(dy[:, tokens])
    expected.backward(dy)

    assert_close(y, expected[:, tokens], rtol=0, atol=0)
    gradient = whole_tensor(part.weight.grad, (part.spec,))
    assert_close(gradient, whole.weight.grad, rtol=0, atol=1e-14)


@ranks(1, 2, 4)
def test_no_rank_stores_a_padding_row():
    part = VocabParallelEmbedding(13, 6, group=_world())
    stored = part.group.all_reduce(torch.tensor(len(part.weight)))
    assert stored == 13


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_traffic_is_one_message_forward(sequence_parallel):
    part = VocabParallelEmbedding(9, 6, sequence_parallel=sequence_parallel, group=_world())
    with CommDebugMode() as traffic:
        y = part(torch.arange(8))
        assert traffic.get_total_counts() == 1
        y.sum().backward()
    assert traffic.get_total_counts() == 1 + sequence_parallel


@ranks(1, 4)
@pytest.mark.parametrize("padding_idx", [5, 40])
def test_f_015_padding_idx_is_an_id_of_the_whole_vocabulary(padding_idx):
    part = VocabParallelEmbedding(128, 4, padding_idx=padding_idx, group=_world())
    assert gather_whole(part)["weight"][padding_idx].eq(0).all()
    part(torch.tensor([37, padding_idx])).sum().backward()
    gradient = whole_tensor(part.weight.grad, (part.spec,))
    expected = torch.zeros(128, 4)
    expected[37] = 1
    assert_close(gradient, expected, rtol=0, atol=0)


@ranks(1, 2, 4)
@pytest.mark.parametrize("wrong", [-1, 13])
def test_an_id_outside_the_vocabulary_raises_on_every_rank(wrong):
    part = VocabParallelEmbedding(13, 6, group=_world())
    with pytest.raises(ValueError, match=f"num_embeddings=13; found .*{wrong}"):
        part(torch.tensor([3, wrong]))
    part.group.barrier()


@ranks(1, 2, 4)
def test_from_and_to_embedding_are_inverse():
    whole = _whole(13, padding_idx=4).requires_grad_(False).eval()
    part = VocabParallelEmbedding.from_embedding(whole, group=_world())
    again = part.to_embedding()
    assert torch.equal(again.weight, whole.weight)
    assert again.padding_idx == 4
    assert not again.weight.requires_grad
    assert not again.training
    assert part.state_dict().keys() == whole.state_dict().keys()
    assert torch.equal(copy.deepcopy(part).to_embedding().weight, whole.weight)


def test_it_is_built_on_meta_from_meta():
    part = VocabParallelEmbedding.from_embedding(nn.Embedding(5, 3, device="meta"))
    assert part.weight.is_meta


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_options_that_it_cannot_serve_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* must not be set"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(5, 3, **option))


def test_a_padding_idx_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="padding_idx=5 must be one of 5 ids"):
        VocabParallelEmbedding(5, 3, padding_idx=5)


@ranks(1, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_compiles_into_one_graph(sequence_parallel):
    part = VocabParallelEmbedding(9, 6, sequence_parallel=sequence_parallel, group=_world())
    compiled = torch.compile(part, fullgraph=True, backend="aot_eager")
    ids = torch.arange(8)
    expected = part(ids)
    expected.sum().backward()
    gradient, part.weight.grad = part.weight.grad, None
    y = compiled(ids)
    y.sum().backward()
    assert_close(y, expected, rtol=0, atol=0)
    assert_close(part.weight.grad, gradient, rtol=0, atol=0)
