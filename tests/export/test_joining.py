"""Tensors of files are put together of ours, whatever the order in which these come."""

from itertools import permutations

import pytest
import torch

from megablocks_core.export.joining import Joiner
from megablocks_core.export.layout import Rule
from megablocks_core.export.operations import Join, Split, Stack, Unstack, lazy

RULES = {
    "one": Rule({"one": (5, 4)}, ("a",)),
    "joined": Rule({"joined": (6, 4)}, ("gate", "up"), (Split((2, 4)),)),
    "stacked": Rule(
        {"stacked": (2, 6, 4)}, ("g0", "g1", "u0", "u1"), (Split((3, 3), 1), Unstack(2))
    ),
    "alone": Rule({"alone": (1, 3, 4)}, ("d",), (Unstack(1),)),
    "fused": Rule(
        {"g0": (3, 4), "u0": (3, 4), "g1": (3, 4), "u1": (3, 4)},
        ("gate_up",),
        (Join((3, 3)), Stack(2)),
    ),
}


@pytest.mark.parametrize("kind", RULES)
def test_tensors_are_whole_when_their_last_part_comes(kind):
    rule = RULES[kind]
    theirs = {name: torch.randn(shape) for name, shape in rule.theirs.items()}
    ours = {
        name: whole[...]
        for name, whole in rule.to_ours([lazy(tensor) for tensor in theirs.values()]).items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == rule.shapes
    for order in permutations(ours):
        joiner = Joiner(RULES.values())
        *early, made = [joiner.add(name, ours[name]) for name in order]
        assert early == [{}] * (len(order) - 1)
        assert list(made) == list(theirs)
        assert all(torch.equal(made[name], theirs[name]) for name in theirs)


def test_what_is_handed_over_may_be_used_again():
    joiner, memory = Joiner([RULES["joined"]]), torch.zeros(2, 4)
    joiner.add("gate", memory)
    memory.fill_(7)
    made = joiner.add("up", torch.ones(4, 4))
    assert made["joined"].sum() == 16
