"""Gaps between tensors and differences of JSON values."""

import math

import torch

from megablocks_core.files import comparing
from megablocks_core.files.comparing import (
    Compared,
    Gap,
    gap_of,
    json_differences,
    tensor_differences,
)
from megablocks_core.files.progress import Progress


def test_gaps_of_special_values():
    nan, inf = math.nan, math.inf
    for a, b, gap in (
        ([nan, inf], [nan, inf], Gap()),
        ([0.0], [-0.0], Gap(1, 0.0, 0.0)),
        ([nan, 1.0], [2.0, 1.0], Gap(1, inf, inf)),
        ([inf], [-inf], Gap(1, inf, inf)),
        ([1.0, 4.0], [1.0, 5.0], Gap(1, 1.0, 0.2)),
    ):
        assert gap_of(torch.tensor(a), torch.tensor(b)) == gap
    large = torch.tensor([2**62, 5])
    assert gap_of(large, large + torch.tensor([1, 0])).count == 1
    assert gap_of(torch.tensor([True]), torch.tensor([False])) == Gap(1, 1.0, 1.0)
    assert gap_of(torch.tensor([1.5]), torch.tensor([1.5]).half()) == Gap()
    far = torch.tensor([math.inf, math.nan, 2.0])
    assert gap_of(far, far.half()) == Gap()
    assert gap_of(far, torch.tensor([inf, nan, 4.0]).half()) == Gap(1, 2.0, 0.5)
    low = torch.tensor([2.0]).to(torch.float8_e4m3fn)
    assert gap_of(low, torch.tensor([4.0]).to(torch.float8_e4m3fn)) == Gap(1, 2.0, 0.5)


def differences(*pair):
    sides = [x if x is None else Compared(x.dtype, tuple(x.shape), x.__getitem__) for x in pair]
    rows = [(slice(row, row + 1),) for row in range(0 if pair[0] is None else len(pair[0]))]
    return list(tensor_differences("x", *sides, boxes=lambda _: rows, progress=Progress("", 1)))


def test_tensors_box_by_box(monkeypatch):
    monkeypatch.setattr(comparing, "_CHUNK", 2)
    x = torch.arange(1.0, 13.0).view(4, 3)
    y = x.clone()
    assert differences(x, y) == []
    y[0, 0], y[3, 2] = 1.5, 24.0
    line = "tensor x: 2 of 12 values differ, by at most 12, relatively 0.5"
    assert differences(x, y) == [line]
    assert differences(x, y.bfloat16()) == ["tensor x: dtype F32 and BF16", line]
    assert differences(x, x.view(3, 4)) == ["tensor x: shape [4, 3] and [3, 4]"]
    assert differences(x, None) == ["only in the first: tensor x"]
    assert differences(None, x) == ["only in the second: tensor x"]


def test_json_values_by_path():
    one = {"a": 1, "b": [1, {"c": None}], "only": 0, "long": "x" * 300, "nan": math.nan}
    other = {"a": 1.0, "b": [1, {"c": 0}], "long": "y" * 300, "nan": math.nan, "new": 1}
    lines = list(json_differences(one, other))
    assert lines[:3] == ["a: 1 and 1.0", "b[1].c: null and 0", "only in the first: only"]
    assert lines[3].startswith("long: ") and len(lines[3]) < 430 and "..." in lines[3]
    assert lines[4:] == ["only in the second: new"]
    assert list(json_differences({"b": [1]}, {"b": [1, 2]}, "top")) == ["top.b: [1] and [1, 2]"]
