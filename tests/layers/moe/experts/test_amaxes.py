"""Largest magnitudes are those of what the loop multiplies, token after token."""

from math import inf

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from tests.layers.moe.experts.cases import HIDDEN, NUM_EXPERTS, ROUTINGS, built, routing


@pytest.mark.parametrize("indices", ROUTINGS.values(), ids=list(ROUTINGS))
@pytest.mark.parametrize("weigh", ["hidden", "input"])
def test_amaxes_are_those_of_each_tokens_experts(indices, weigh):
    experts = built(weigh=weigh)
    routed = routing(indices)
    x = torch.randn(len(routed.indices), HIDDEN, dtype=torch.float64)
    dispatched, _ = LocalDispatcher().dispatch(x, routed)
    inputs, hidden = [-inf] * NUM_EXPERTS, [-inf] * NUM_EXPERTS
    for token, (chosen, weights) in enumerate(zip(routed.indices, routed.weights, strict=True)):
        for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
            if expert < 0:
                continue
            row = x[token] * (weight if weigh == "input" else 1)
            gate, up = (p[expert] @ row for p in (experts.gate_proj, experts.up_proj))
            inputs[expert] = max(inputs[expert], float(row.abs().max()))
            hidden[expert] = max(hidden[expert], (F.silu(gate) * up).abs().max().item())
    found = experts.input_amaxes(dispatched)
    assert found.keys() == {"gate_proj", "up_proj", "down_proj"}
    assert_close(found["gate_proj"], torch.tensor(inputs))
    assert_close(found["up_proj"], torch.tensor(inputs))
    assert_close(found["down_proj"], torch.tensor(hidden))


def test_experts_without_a_gate_have_none_and_a_capacity_changes_nothing():
    experts = built(activation="relu2", bias=True)
    with torch.no_grad():
        for name in ("up_bias", "down_bias"):
            getattr(experts, name).fill_(0.5)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    for capacity in (None, 4):
        dispatched, _ = LocalDispatcher().dispatch(x, routing(ROUTINGS["mixed"], capacity=capacity))
        found = experts.input_amaxes(dispatched)
        assert found.keys() == {"up_proj", "down_proj"}
        up = x[3] @ experts.up_proj[1].T + 0.5
        assert found["down_proj"][1] >= F.relu(up).square().max().float()
        assert_close(found["up_proj"][3], x[2].abs().max().float())
