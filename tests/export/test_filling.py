"""Memory is filled with the values of lazy tensors, by box, dtype, stack and layout in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megablocks_core.export import filling
from megablocks_core.export.filling import Piece, fill, pieces
from megablocks_core.export.lazies import View, lazy
from megablocks_core.export.operations import Transpose
from megablocks_core.files.slices import open_tensors
from megablocks_core.groups import LOCAL, ShardSpec

NONE = slice(None)


def _files(folder, tensors):
    save_file(tensors, folder / "f.safetensors")
    return open_tensors(folder / "f.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("piece_bytes", [2**26, 40])
def test_a_tensor_has_the_values_of_the_file(dtype, piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(filling, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(filling, "STEP_BYTES", 24)
    monkeypatch.setattr(filling, "_SLAB_BYTES", 24)
    held = {"x": torch.randn(5, 7, 3), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    found = _files(tmp_path, held)
    for name, values in held.items():
        for whole in (found[name], lazy(values)):
            for target in (torch.full(values.shape, torch.nan, dtype=dtype),):
                plan = list(pieces(target, (), {name: whole}, stacked=False))
                assert fill(plan) == []
                assert torch.equal(target, values.to(dtype))


def test_targets_that_are_not_contiguous_are_filled_too(tmp_path):
    values = torch.randn(6, 4)
    whole = _files(tmp_path, {"x": values})["x"]
    memory = torch.full((4, 6), torch.nan)
    assert fill(list(pieces(memory.t(), (), {"x": whole}, stacked=False))) == []
    assert torch.equal(memory.t(), values)
    (turned,) = Transpose()([whole])
    assert fill(list(pieces(memory, (), {"x": turned}, stacked=False))) == []
    assert torch.equal(memory, values.t())


def test_a_stack_is_filled_from_its_tensors(tmp_path):
    apart = {f"e{index}": torch.full((2, 3), float(index)) for index in range(4)}
    found = _files(tmp_path, apart)
    stack = torch.full((4, 2, 3), torch.nan)
    wholes = {name: found[name] for name in apart}
    assert fill(list(pieces(stack, (ShardSpec(1, LOCAL),), wholes, stacked=True))) == []
    assert torch.equal(stack, torch.stack(list(apart.values())))


@given(st.data())
def test_boxes_go_where_they_belong(data):
    whole = torch.arange(60.0).view(3, 4, 5)
    target = torch.full((3, 4, 5), -1.0)
    box = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
        for n in whole.shape
    )
    plan = [Piece("x", target[box], lazy(whole), box)]
    assert fill(plan) == []
    right = torch.full_like(target, -1.0)
    right[box] = whole[box]
    assert torch.equal(target, right)


def test_values_that_are_not_finite_are_named_in_order(tmp_path):
    found = _files(
        tmp_path,
        {"a": torch.ones(3), "b": torch.tensor([1, torch.nan]), "c": torch.tensor([1e30])},
    )
    memory = {name: torch.empty(found[name].get_shape()) for name in "cba"}
    half = torch.empty(1, dtype=torch.float16)
    plan = [
        part
        for name, target in {"c": half, "b": memory["b"], "a": memory["a"]}.items()
        for part in pieces(target, (), {name: found[name]}, stacked=False)
    ]
    assert fill(plan) == ["c", "b"]
    assert memory["b"][0] == 1 and memory["a"].sum() == 3


def test_a_fault_while_reading_ends_all_threads():
    def failing(_):
        raise OSError("the disk is gone")

    whole = View((8,), "F32", failing)
    targets = [torch.empty(8) for _ in range(50)]
    plan = [Piece("x", target, whole, (slice(0, 8),)) for target in targets]
    with pytest.raises(OSError, match="the disk is gone"):
        fill(plan)
