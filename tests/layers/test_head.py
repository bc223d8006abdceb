"""The head equals one process at any vocabulary size, tied or not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers import VocabParallelHead
from megablocks_core.testing import assert_parallel_equivalence, ranks


@ranks(1, 2, 4)
def test_any_vocabulary_equals_one_process():
    """Rows cut 3 3 3 1, evenly, and 1 1 1 0 over four ranks."""
    tp = Mesh(tp=dist.get_world_size()).group("tp")
    for vocab_size in (10, 8, 3):
        for sequence_parallel in (False, True):
            assert_parallel_equivalence(
                lambda group, size=vocab_size, cut=sequence_parallel: _Gathered(
                    VocabParallelHead(8, size, sequence_parallel=cut, group=group)
                ),
                torch.randn(2, 4, 8),
                group=tp,
                loss=lambda y_TV: (y_TV.sin() * torch.arange(y_TV.shape[-1])).sum(),
                split=(lambda x: x.chunk(tp.size, dim=-2)[tp.rank]) if sequence_parallel else None,
                same_start=True,
            )


@ranks(2)
def test_it_sends_nothing_forward_and_once_backward():
    head = VocabParallelHead(8, 10, group=Mesh(tp=2).group("tp"))
    with CommDebugMode() as traffic:
        logits_Tv = head(torch.ones(3, 8, requires_grad=True))
        assert traffic.get_total_counts() == 0
        logits_Tv.sum().backward()
    assert traffic.get_total_counts() == 1
    with CommDebugMode() as traffic:
        head.gather(logits_Tv)
    assert traffic.get_total_counts() == 1


def test_over_one_rank_it_is_a_linear_layer():
    head, x_TH = VocabParallelHead(8, 10), torch.randn(3, 8)
    assert_close(head(x_TH), x_TH @ head.weight.T)
    assert head.gather(x_TH) is x_TH
    assert [name for name, _ in head.named_parameters()] == ["weight"]


class _Gathered(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x_TH):
        return self.head.gather(self.head(x_TH))
