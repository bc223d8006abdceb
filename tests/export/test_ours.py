"""Boxes of what is made of ours are computed of the boxes that they need, and of no others."""

import pytest
import torch

from megablocks_core.export import slabs as slabs_module
from megablocks_core.export.layout import Rule
from megablocks_core.export.lazies import View, lazy
from megablocks_core.export.operations import Join, Resize, Split, Stack, Transpose, Unstack
from megablocks_core.export.ours import Ours
from megablocks_core.export.slabs import slabs
from megablocks_core.groups import Whole

RULES = {
    "one": Rule({"one": (5, 4)}, ("a",)),
    "joined": Rule({"joined": (6, 4)}, ("gate", "up"), (Split((2, 4)),)),
    "stacked": Rule(
        {"stacked": (2, 6, 4)}, ("g0", "g1", "u0", "u1"), (Split((3, 3), 1), Unstack(2))
    ),
    "turned": Rule({"turned": (2, 4, 6)}, ("d0", "d1"), (Transpose(1, 2), Unstack(2))),
    "alone": Rule({"alone": (1, 3, 4)}, ("d",), (Unstack(1),)),
    "padded": Rule({"table": (5, 4)}, ("table",), (Resize(5, 8),)),
    "alternating": Rule({"both": (8, 4)}, ("gate", "up"), (Split((1, 1), groups=4),)),
    "fused": Rule(
        {"g0": (3, 4), "u0": (3, 4), "g1": (3, 4), "u1": (3, 4)},
        ("gate_up",),
        (Join((3, 3)), Stack(2)),
    ),
}


@pytest.mark.parametrize("nbytes", [8, 16, 40, 4096])
@pytest.mark.parametrize("kind", RULES)
def test_slabs_are_made_of_what_they_need(monkeypatch, kind, nbytes):
    monkeypatch.setattr(slabs_module, "SLAB_BYTES", nbytes)
    rule = RULES[kind]
    theirs = {name: torch.randn(shape) for name, shape in rule.theirs.items()}
    ours = {
        name: whole[...]
        for name, whole in rule.to_ours([lazy(tensor) for tensor in theirs.values()]).items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == rule.shapes
    held = Ours(Whole(name, shape, torch.float32) for name, shape in rule.shapes.items())
    made_of, needed = rule.to_theirs([held[name] for name in rule.ours]), 0
    for name, whole in theirs.items():
        for box in slabs(tuple(whole.shape), whole.dtype):
            needs = held.needs(made_of[name], box)
            values = [ours[part][inside] for part, inside in needs]
            made = held.values(made_of[name], box, values)
            assert torch.equal(made, whole[box])
            needed += sum(ours[part][inside].numel() for part, inside in needs)
    if kind != "alternating" or nbytes % 32 == 0:  # a slab may begin between two that alternate
        assert needed == sum(whole.numel() for whole in theirs.values())


def test_no_value_is_read_unasked():
    with pytest.raises(AssertionError, match="a was not asked for"):
        Ours([Whole("a", (2,), torch.float32)])["a"][...]


def test_each_has_its_dtype_and_shape_before_there_are_values():
    held = Ours([Whole("a", (2, 3), torch.bfloat16)])
    assert ("a" in held, "b" in held) == (True, False)
    assert (held["a"].get_dtype(), held["a"].get_shape()) == ("BF16", (2, 3))
    dtypes = []

    def read(box):
        values = held["a"][box]
        dtypes.append((values.dtype, values.is_meta))
        return values

    held.needs(View((2, 3), "BF16", read), (slice(0, 1), slice(0, 3)))
    assert dtypes == [(torch.bfloat16, True)]
