"""Tensors are found wherever outputs hold them, and nodes wherever they lie below another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from megablocks_core.parallel.data_parallel.graph import reaches, tensors_in


@dataclass
class _Outputs:
    logits: Any
    more: Any


def test_tensors_are_found_in_any_nest():
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    nest = [a, {"b": (b, 3)}, _Outputs(c, [_Outputs(None, d)]), "text", _Outputs]
    assert list(map(id, tensors_in(nest))) == list(map(id, (a, b, c, d)))


def test_a_node_is_reached_through_others_only():
    x, y, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    z = (x * 2 + y.exp()).sum()
    nodes = {one: get_gradient_edge(one).node for one in (x, y, other)}
    assert reaches(z.grad_fn, {nodes[x]}) and reaches(z.grad_fn, {nodes[other], nodes[y]})
    assert not reaches(z.grad_fn, {nodes[other]})
    assert not reaches(None, {nodes[x]})
