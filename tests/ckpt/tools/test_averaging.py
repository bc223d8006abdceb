"""The mean of weights, in float64, in the dtype they had."""

import json

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.tools import checkpoint
from megablocks_core.ckpt.tools.averaging import average


def save(path, **state):
    ckpt.save(path, state, files={"config.json": {"a": 1}, "note.json": path.name})


def test_sums_in_float64_and_keeps_dtypes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SLAB_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 7, generator=generator) * 10.0 ** (9 * k) for k in (0, 1, 0)]
    parts[2] = 1.0 - parts[1]  # in float32 what the first adds is lost
    for number, part in enumerate(parts):
        save(tmp_path / f"{number}", x=part, half=part[0].div(1e9).bfloat16(), ids=torch.arange(3))
    average([tmp_path / f"{number}" for number in range(3)], tmp_path / "mean")
    ckpt.verify(tmp_path / "mean")
    state = {
        "x": torch.zeros(5, 7),
        "half": torch.zeros(7).bfloat16(),
        "ids": torch.zeros(3, dtype=torch.int64),
    }
    ckpt.load(tmp_path / "mean", state)
    exact = torch.stack(parts).double().sum(0) / 3
    assert torch.equal(state["x"], exact.float())
    assert not torch.equal(state["x"], sum(parts) / 3)
    assert torch.equal(state["ids"], torch.arange(3))
    halves = torch.stack([part[0].div(1e9).bfloat16().double() for part in parts])
    assert torch.equal(state["half"], (halves.sum(0) / 3).bfloat16())
    assert json.loads((tmp_path / "mean" / "config.json").read_bytes()) == {"a": 1}
    assert not (tmp_path / "mean" / "note.json").exists()


def test_only_weights_are_kept(tmp_path):
    model = torch.nn.Linear(2, 2)
    for number in (1, 2):
        with torch.no_grad():
            model.weight.fill_(number)
        state = {"model": model, "step": number, "optimizer": torch.optim.SGD(model.parameters())}
        ckpt.save(tmp_path / f"{number}", state)
    average([tmp_path / "1", tmp_path / "2"], tmp_path / "mean")
    ckpt.load(tmp_path / "mean", {"model": model})
    assert (model.weight == 1.5).all()


def test_what_does_not_match_is_named(tmp_path):
    x = torch.ones(2)
    save(tmp_path / "a", x=x, n=torch.tensor(1))
    others = {
        "lacks": ({"x": x}, "'n/n' is in .*a but not in .*lacks"),
        "more": ({"x": x, "n": torch.tensor(1), "y": x}, "'y/y' is in .*more but not in .*a"),
        "shape": ({"x": torch.ones(3), "n": torch.tensor(1)}, r"'x/x' is torch.float32 \[2\] in"),
        "dtype": ({"x": x.half(), "n": torch.tensor(1)}, r"but torch.float16 \[2\] in"),
        "int": ({"x": x, "n": torch.tensor(2)}, "'n/n' of dtype torch.int64 has no mean"),
    }
    for name, (state, message) in others.items():
        save(tmp_path / name, **state)
        with pytest.raises(ValueError, match=message):
            average([tmp_path / "a", tmp_path / name], tmp_path / "out")
    with pytest.raises(ValueError, match="must be two or more"):
        average([tmp_path / "a"], tmp_path / "out")
    ckpt.save(tmp_path / "values", {"step": 1})
    with pytest.raises(ValueError, match="has no weights"):
        average([tmp_path / "values"] * 2, tmp_path / "out")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        average([tmp_path / "a"] * 2, tmp_path / "a")
    assert not (tmp_path / "out").exists()
