"""Parts of tensors on disk are read as slices, and joined to the tensor again."""

from itertools import permutations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megablocks_core.export.layout import OnDisk
from megablocks_core.export.parts import Joiner, views

TENSORS = {
    "one": OnDisk("one", (5, 4), ("a",)),
    "joined": OnDisk("joined", (6, 4), ("gate", "up")),
    "stacked": OnDisk("stacked", (2, 6, 4), ("g0", "u0", "g1", "u1"), stacked=True),
    "single": OnDisk("single", (1, 6, 4), ("g", "u"), stacked=True),
    "alone": OnDisk("alone", (1, 3, 4), ("d",), stacked=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_parts_join_to_the_tensor_in_any_order(kind, tmp_path):
    tensor = TENSORS[kind]
    whole = torch.randn(tensor.shape)
    save_file({"x": whole}, tmp_path / "f")
    with safe_open(str(tmp_path / "f"), "pt") as file:
        parts = dict(views(file.get_slice("x"), tensor))
        assert tuple(parts) == tensor.parts
        assert {tuple(part.get_shape()) for part in parts.values()} == {tensor.part_shape}
        assert {part.get_dtype() for part in parts.values()} == {"F32"}
        for order in permutations(parts):
            joiner = Joiner([tensor])
            found = [joiner.add(name, parts[name][:]) for name in order]
            assert found[:-1] == [None] * (len(order) - 1)
            assert found[-1] is not None
            name, joined = found[-1]
            assert name == tensor.name
            assert torch.equal(joined, whole)


@pytest.mark.parametrize("kind", TENSORS)
def test_slices_of_parts_are_slices_of_what_is_read(kind, tmp_path):
    tensor = TENSORS[kind]
    save_file({"x": torch.randn(tensor.shape)}, tmp_path / "f")
    with safe_open(str(tmp_path / "f"), "pt") as file:
        for part in dict(views(file.get_slice("x"), tensor)).values():
            box = (slice(1, 3), slice(0, 2))
            assert torch.equal(part[box], part[...][box])
            assert torch.equal(part[slice(1, 2)], part[...][1:2])


def test_what_is_handed_over_may_be_used_again():
    joiner, memory = Joiner([TENSORS["joined"]]), torch.zeros(3, 4)
    joiner.add("gate", memory)
    joined = joiner.add("up", memory.fill_(1))
    assert joined is not None
    assert joined[1][:3].eq(0).all()
    assert joined[1][3:].eq(1).all()
