"""On one rank tokens stay where they are."""

import torch

from megablocks_core.layers.moe.dispatch import LocalDispatcher
from tests.layers.moe.dispatch.reference import random, routing_of


def test_experts_are_handed_the_layers_own_input_and_the_rows_of_their_tokens():
    x, indices = random(3, 4), torch.tensor([[1, 0], [2, 1], [1, -1]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.0]])
    dispatched, handle = LocalDispatcher().dispatch(x, routing_of(indices, weights, 3))
    assert dispatched.x is x
    assert dispatched.rows.tolist() == [0, 0, 1, 2, 1, -1]
    assert torch.equal(dispatched.weights, torch.tensor([0.2, 0.1, 0.4, 0.5, 0.3, 0.0]))
    assert dispatched.tokens_per_expert.tolist() == [1, 3, 1]
    results = torch.arange(6.0).unsqueeze(1)
    assert LocalDispatcher().combine(results, handle).tolist() == [[1.0], [6.0], [3.0]]


def test_places_of_a_capacity_lie_apart():
    x, indices = random(3, 4), torch.tensor([[1], [1], [0]])
    routing = routing_of(indices, torch.ones(3, 1), 2, capacity=1)
    dispatched, handle = LocalDispatcher().dispatch(x, routing)
    assert dispatched.rows.tolist() == [2, 0] and dispatched.capacity == 1
    assert LocalDispatcher().combine(torch.ones(2, 4), handle)[:, 0].tolist() == [1, 0, 1]
