"""One chunk of the gated delta rule against its triangular system written out."""

import torch
from torch.testing import assert_close

from megablocks_core.layers.ssm.functions.chunked.borders import Borders
from megablocks_core.layers.ssm.functions.chunked.scan import recurrence_of
from megablocks_core.layers.ssm.functions.delta.chunks import NAME
from tests.layers.ssm.functions.chunked.kinds import KINDS, states

_KIND = KINDS["delta 1"]


def test_a_chunk_solves_for_what_tokens_write():
    torch.manual_seed(0)
    inputs = [leaf.detach()[:, None] for leaf in _KIND.leaves(1, 6)]
    state = states(_KIND, 1).detach()
    y, (behind,) = recurrence_of(NAME).forward(inputs, [], state, Borders(), True)
    q, k, v, g, beta = (x[0, 0] for x in inputs)
    for head in range(2):
        written: list[torch.Tensor] = []
        for i in range(6):
            recalled = g[: i + 1, head].sum().exp() * k[i, head] @ state[0, head]
            for j, u in enumerate(written):
                recalled = (
                    recalled + g[j + 1 : i + 1, head].sum().exp() * (k[i] * k[j])[head].sum() * u
                )
            written.append(beta[i, head] * (v[i, head] - recalled))
        right = g[:, head].sum().exp() * state[0, head]
        for j, u in enumerate(written):
            right = right + g[j + 1 :, head].sum().exp() * torch.outer(k[j, head], u)
        assert_close(behind[0, head], right)
        assert y is not None
        assert_close(y[0, 0, -1, head], q[-1, head] @ right)
