"""The loop is what a reader would write for each token and slot."""

import torch
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from tests.layers.moe.experts.cases import HIDDEN, ROUTINGS, built, routing


def test_it_is_the_weighted_sum_of_each_tokens_experts():
    experts = built("loop")
    for indices in ROUTINGS.values():
        routed = routing(indices)
        x = torch.randn(len(routed.indices), HIDDEN, dtype=torch.float64)
        dispatcher = LocalDispatcher()
        dispatched, handle = dispatcher.dispatch(x, routed)
        y = dispatcher.combine(experts(dispatched), handle)
        expected = torch.zeros_like(x)
        for token, (chosen, weights) in enumerate(zip(routed.indices, routed.weights, strict=True)):
            for expert, weight in zip(chosen.tolist(), weights, strict=True):
                if expert < 0:
                    continue
                gate, up = (p[expert] @ x[token] for p in (experts.gate_proj, experts.up_proj))
                expected[token] += weight * (experts.down_proj[expert] @ (F.silu(gate) * up))
        assert_close(y, expected)
