"""A difference of any kind is one line; equal checkpoints have none."""

import math

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.tools import checkpoint
from megablocks_core.ckpt.tools.differing import diff
from megablocks_core.ckpt.tools.opening import open_checkpoint
from megablocks_core.files import comparing
from megablocks_core.files.progress import Progress
from tests.ckpt.tools.saves import save_dcp, save_ours, trained


def lines(one, other):
    pair = (open_checkpoint(path) for path in (one, other))
    return list(diff(*pair, progress=Progress("", 1)))


def test_equal_checkpoints_have_no_difference_in_either_form(tmp_path):
    save_ours(tmp_path / "a")
    save_ours(tmp_path / "b")
    save_dcp(tmp_path / "dcp", *trained())
    assert lines(tmp_path / "a", tmp_path / "b") == []
    del_empty = {"versions": {"torch": "2.13"}, "spec": [1, {"a": 2.5, "none": None}]}
    save_ours(tmp_path / "c", run=del_empty)  # torch's DCP leaves empty dicts out
    assert lines(tmp_path / "c", tmp_path / "dcp") == []


def test_names_shapes_and_dtypes(tmp_path):
    ckpt.save(tmp_path / "a", {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(4)})
    other = {"w": torch.ones(2), "y": torch.ones(3), "z": torch.ones(4).bfloat16()}
    ckpt.save(tmp_path / "b", other)
    assert lines(tmp_path / "a", tmp_path / "b") == [
        "only in the first: x",
        "only in the second: w",
        "only in the first: tensor x/x",
        "tensor y/y: shape [2] and [3]",
        "tensor z/z: dtype F32 and BF16",
        "only in the second: tensor w/w",
    ]


def test_values_in_slabs(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SLAB_BYTES", 64)
    monkeypatch.setattr(comparing, "_CHUNK", 4)
    a = torch.arange(1.0, 61.0).reshape(6, 10)
    b = a.clone()
    b[0, 0], b[5, 9] = 1.5, 59.0
    ckpt.save(tmp_path / "a", {"x": a})
    ckpt.save(tmp_path / "b", {"x": b})
    assert lines(tmp_path / "a", tmp_path / "b") == [
        "tensor x/x: 2 of 60 values differ, by at most 1, relatively 0.333333"
    ]


def test_json_by_path_and_run_records(tmp_path):
    run = {"versions": {"torch": "2.12"}, "spec": [1, {"a": 2.5, "none": 0}], "label": "x"}
    save_ours(tmp_path / "a", lr=0.1, nan=math.nan)
    save_ours(tmp_path / "b", run=run, lr=1, nan=math.nan)
    assert lines(tmp_path / "a", tmp_path / "b") == [
        'run.value.versions.torch: "2.13" and "2.12"',
        "run.value.spec[1].none: null and 0",
        "only in the first: run.value.empty",
        "only in the second: run.value.label",
        "lr.value: 0.1 and 1",
    ]


def test_files_beside(tmp_path):
    x = {"x": torch.ones(1)}
    ckpt.save(tmp_path / "a", x, files={"config.json": {"a": 1}, "only.json": 1})
    ckpt.save(tmp_path / "b", x, files={"config.json": {"a": 2}})
    assert lines(tmp_path / "a", tmp_path / "b") == [
        "file config.json: differs",
        "only in the first: file only.json",
    ]


def test_damage_raises(tmp_path):
    for name in "ab":
        ckpt.save(tmp_path / name, {"x": torch.ones(2)})
    path = tmp_path / "b" / "x.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ckpt.CheckpointError, match="damaged"):
        lines(tmp_path / "a", tmp_path / "b")
