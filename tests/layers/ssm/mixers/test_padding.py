"""Which tokens are no pads, also of a cut row."""

import pytest
import torch

from megablocks_core.groups import Group
from megablocks_core.layers.ssm.mixers.padding import real_tokens
from megablocks_core.parallel import SequenceCut

CU = torch.tensor([0, 3, 3, 5])
STORED = torch.tensor([0, 4, 6, 9])
REAL = [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]


def test_pads_lie_behind_each_document_and_the_last():
    assert real_tokens(CU, STORED, length=10).int().tolist() == REAL


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_each_rank_knows_its_own(kind):
    for rank in range(2):
        cut = SequenceCut(10, cu_seqlens=STORED, group=Group((0, 1), rank=rank), kind=kind)
        expected = [REAL[at] for start, stop in cut.pieces for at in range(start, stop)]
        assert real_tokens(CU, STORED, length=10, cut=cut).int().tolist() == expected
