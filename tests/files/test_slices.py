"""Boxes of tensors are read from files as torch would index the whole, into any memory."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megablocks_core.files import slices
from megablocks_core.files.slices import TensorFile, boxes, full_box, open_tensors

SHAPES = [(), (1,), (7,), (5, 9), (3, 4, 6), (2, 3, 4, 5), (0, 4), (4, 0)]


@pytest.fixture(scope="module")
def wholes():
    torch.manual_seed(0)
    return {str(shape): torch.randn(shape).bfloat16() for shape in SHAPES}


@pytest.fixture(scope="module")
def file(wholes, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "f"
    save_file(wholes, path)
    return open_tensors(path)


def _spans(size):
    ends = st.lists(st.integers(0, size), min_size=2, max_size=2).map(sorted)
    return ends.map(lambda pair: slice(*pair))


_BOXES = st.sampled_from(SHAPES).flatmap(
    lambda shape: st.tuples(st.just(shape), st.tuples(*map(_spans, shape)))
)


@given(
    drawn=_BOXES,
    step=st.sampled_from([1, 8, 20, 2**20]),
    gap=st.sampled_from([0, 3, 2**16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float64]),
    strided=st.booleans(),
)
def test_any_box_is_read_into_any_memory(file, wholes, drawn, step, gap, dtype, strided):
    shape, box = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "STEP_BYTES", step)
        patch.setattr(slices, "_GAP_BYTES", gap)
        tensor, whole = file[str(shape)], wholes[str(shape)]
        assert torch.equal(tensor[box], whole[box])
        memory = torch.full((*whole[box].shape, 2), torch.nan, dtype=dtype)
        target = memory[..., 0] if strided else memory.flatten()[: whole[box].numel()]
        target = target.view(whole[box].shape)
        tensor.read_into(target, box)
        assert torch.equal(target, whole[box].to(dtype))
        assert memory.isnan().sum() == memory.numel() - target.numel()


def test_a_tensor_is_indexed_as_safetensors_indexes(file, wholes):
    tensor, whole = file["(5, 9)"], wholes["(5, 9)"]
    assert (tensor.get_shape(), tensor.get_dtype()) == ((5, 9), "BF16")
    for box in (..., slice(None), slice(1, -1), (slice(1, 3), ...)[:1], (slice(4), slice(2, 99))):
        assert torch.equal(tensor[box], whole[box])
    with pytest.raises(ValueError, match=r"target of shape \(2,\) must have shape \(1, 9\)"):
        tensor.read_into(torch.empty(2), slice(0, 1))


def test_whole_rows_go_straight_into_their_target(file, monkeypatch):
    """Their memory is what is read into; nothing is made in between."""
    given = []
    read = TensorFile.read

    def noting(file, memory, offset):
        given.append(memory)
        read(file, memory, offset)

    monkeypatch.setattr(TensorFile, "read", noting)
    target = torch.empty(5, 9, dtype=torch.bfloat16)
    file["(5, 9)"].read_into(target[1:4], slice(0, 3))
    (memory,) = given
    before = target[1].clone()
    memory[0] = memory[0] ^ 255
    assert not torch.equal(target[1], before)


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "f")
    file = open_tensors(tmp_path / "f")
    os.truncate(tmp_path / "f", os.path.getsize(tmp_path / "f") - 4)
    with pytest.raises(ValueError, match="f is cut short: it ends before byte"):
        file["a"][:]


def test_a_file_is_closed_with_its_last_tensor(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "f")
    tensor = open_tensors(tmp_path / "f")["a"]
    assert tensor[:].tolist() == [1, 1]
    descriptor = tensor.file._descriptor
    assert os.path.samestat(os.fstat(descriptor), os.stat(tmp_path / "f"))
    del tensor
    with pytest.raises(OSError):
        os.fstat(descriptor)


@given(drawn=_BOXES, limit=st.sampled_from([1, 2, 8, 30, 1000]))
def test_parts_of_a_box_follow_each_other_in_memory(drawn, limit):
    shape, box = drawn
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [whole[part] for part in boxes(full_box(box, shape), 2, limit)]
    joined = torch.cat([part.flatten() for part in parts]) if parts else whole.new_empty(0)
    assert torch.equal(joined, whole[box].flatten())
    assert all(part.numel() * 2 <= max(limit, 2) for part in parts)
