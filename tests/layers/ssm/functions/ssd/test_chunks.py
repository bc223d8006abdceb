"""What is known of chunks before anything is multiplied."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.ssd.chunks import Chunks, Inputs
from megablocks_core.layers.ssm.functions.ssd.plan import Region


def test_tokens_meet_earlier_ones_of_their_document():
    torch.manual_seed(0)
    x, dt, B, C = (torch.randn(1, 8, *sizes) for sizes in ((4, 3), (4,), (2, 5), (2, 5)))
    A, D = -torch.rand(4), torch.randn(4)
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    inputs = Inputs(x, dt.abs(), A, B, C, D, None, document)
    chunks = Chunks(inputs, Region(slice(0, 1), 0, 2, 4, 0, 0), torch.float32)
    for group in range(2):
        for i in range(8):
            for j in range(i // 4 * 4, i // 4 * 4 + 4):
                product = (C[0, i, group] * B[0, j, group]).sum()
                right = product if j < i and document[i] == document[j] else torch.zeros(())
                assert_close(chunks.meets[i // 4, 0, group, i % 4, j % 4], right)
            own = chunks.own[i // 4, 0, group, i % 4]
            assert_close(own, (C[0, i, group] * B[0, i, group]).sum())
            for head in (2 * group, 2 * group + 1):
                skip = chunks.skip[i // 4, 0, head, i % 4]
                assert_close(skip, dt[0, i, head].abs() * own + D[head])
    assert torch.equal(chunks.x[1, 0, 1, 2, 0], x[0, 6, 2])
    assert torch.equal(chunks.by_token(chunks.dt)[1, 0, 1, 2, 0, 0], dt[0, 6, 2].abs())
