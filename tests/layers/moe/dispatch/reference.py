"""Seeded tokens and routings, a loop over experts, and one process's results and gradients."""

import torch
from torch import Tensor

from megablocks_core.groups import LOCAL
from megablocks_core.layers.moe.dispatch import LocalDispatcher
from megablocks_core.layers.moe.routing import Routing

H, F = 3, 4


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def routing_of(indices, weights, num_experts, capacity=None):
    """A routing of given choices; its scores and logits play no part here."""
    empty = torch.zeros(len(indices), num_experts, dtype=torch.float64)
    counts = (indices.reshape(-1, 1) == torch.arange(num_experts)).sum(0)
    return Routing(indices, weights, empty, empty, counts, None, capacity)


def choices(kind, tokens, num_experts, k):
    """Experts of each slot, by the name of the case."""
    scores = random(tokens, num_experts, seed=5)
    indices = scores.topk(min(k, num_experts), dim=-1).indices
    if kind == "one expert":
        return torch.full((tokens, 1), num_experts - 1)
    if kind == "all experts":
        return scores.argsort(descending=True)
    if kind == "ties":
        return torch.arange(k).expand(tokens, k).contiguous()
    if kind == "masked":
        return torch.where((torch.arange(tokens) % 3 == 0).unsqueeze(1), -1, indices)
    if kind == "expert choice":
        return torch.where(scores > 0.5, torch.arange(num_experts), -1)
    return indices


class Experts:
    """``tanh(x up) down`` of each expert, weighted at the hidden activation."""

    def __init__(self, num_experts, *, experts=slice(None), etp=LOCAL):
        features = slice(None)
        if etp.size > 1:
            features = slice(etp.rank * F // etp.size, (etp.rank + 1) * F // etp.size)
        self.up = random(num_experts, H, F, seed=1)[experts, :, features].clone().requires_grad_()
        down = random(num_experts, F, H, seed=2)[experts, features]
        self.down = down.clone().requires_grad_()

    def __call__(self, dispatched):
        y = dispatched.x.new_zeros(len(dispatched.rows), H)
        start = 0
        for expert, count in enumerate(dispatched.tokens_per_expert.tolist()):
            if dispatched.capacity is not None:
                start = expert * dispatched.capacity
            if count:
                places = torch.arange(start, start + count)
                rows = dispatched.x[dispatched.rows[places]]
                hidden = (rows @ self.up[expert]).tanh() * dispatched.weights[places, None]
                y = y.index_put((places,), hidden @ self.down[expert])
            start += count
        return y

    def gradients(self):
        """Gradients, zero where an expert got nothing."""
        return [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in (self.up, self.down)
        ]


def loss_of(y: Tensor) -> Tensor:
    """A sum over tokens, of which each element has another gradient."""
    return (y * y + torch.arange(H) * y).sum()


def alone(x, indices, weights, num_experts, capacities=None):
    """Results and gradients in one process: (y, dx, dweights, gradients of the experts).

    ``capacities`` are of ranges of tokens: (tokens, capacity) each.
    """
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts, dispatcher = Experts(num_experts), LocalDispatcher()
    results, start = [], 0
    for tokens, capacity in capacities or [(len(x), None)]:
        part = slice(start, start + tokens)
        routing = routing_of(indices[part], weights[part], num_experts, capacity)
        dispatched, handle = dispatcher.dispatch(x[part], routing)
        results.append(dispatcher.combine(experts(dispatched), handle))
        start += tokens
    y = torch.cat(results)
    (loss_of(y) + 0 * (x.sum() + weights.sum())).backward()
    return y.detach(), x.grad, weights.grad, experts.gradients()
