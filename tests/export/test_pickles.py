"""Pickles of weights are read as tensors and nothing else."""

import pytest
import torch

from megablocks_core.export.pickles import read_pickle


def test_tensors_are_sliced(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "x.bin")
    found = read_pickle(tmp_path / "x.bin")
    assert found.keys() == tensors.keys()
    assert (found["a"].get_shape(), found["a"].get_dtype()) == ((3, 4), "F32")
    assert found["b"].get_dtype() == "BF16"
    assert torch.equal(found["a"][slice(1, 3), slice(0, 2)], tensors["a"][1:3, :2])
    assert torch.equal(found["b"][:], tensors["b"])


class _Runs:
    def __reduce__(self):
        return (print, ("a file must not do this",))


@pytest.mark.parametrize("damage", ["cut", "empty", "code", "list", "numbers"])
def test_what_is_no_pickle_of_tensors_is_named(tmp_path, damage, capsys):
    path = tmp_path / "x.bin"
    values = {
        "code": {"a": _Runs()},
        "list": [torch.ones(2)],
        "numbers": {"a": torch.ones(2), "step": 3},
    }
    torch.save(values.get(damage, {"a": torch.ones(2)}), path)
    if damage in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    with pytest.raises(ValueError, match=r"x\.bin must hold tensors"):
        read_pickle(path)
    assert not capsys.readouterr().out
