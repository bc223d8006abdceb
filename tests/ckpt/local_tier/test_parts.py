"""A part says what it holds, and only whole parts of a folder count."""

import json

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.local_tier.parts import (
    Contents,
    PartId,
    SaveId,
    batches,
    complete_saves,
    remove_leftovers,
    remove_others,
    survey,
)
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.ckpt.plans.outlines import Outline
from megablocks_core.groups import LOCAL

MB = 2**20


def _contents():
    boxes = [(slice(0, 2), slice(3, 5)), (slice(2, 4), slice(0, 5))]
    outlines = [
        Outline("x/a", torch.bfloat16, (4, 5), boxes),
        Outline("x/b", torch.float32, (9 * MB,), [(slice(0, 9 * MB),)]),
        Outline("x/c", torch.int64, (), [()]),
        Outline("x/d", torch.float32, (0, 3), []),
    ]
    return Contents({"x": {"kind": "module"}, "n": {"kind": "json", "value": 2**70}}, outlines)


def test_what_a_part_holds_is_read_as_it_was_written():
    contents = _contents()
    text = json.dumps(contents.manifest_state())
    read = Contents.of(json.loads(text), "p")
    assert read.state == contents.state
    expected = [(name, dtype, shape, boxes) for name, dtype, shape, boxes, _ in contents.outlines]
    assert [(name, dtype, shape, boxes) for name, dtype, shape, boxes, _ in read.outlines] == (
        expected
    )
    assert json.dumps(read.manifest_state()) == text


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"state": {}},
        {"state": 3, "outlines": []},
        {"state": {"x": {"kind": "pickle"}}, "outlines": []},
        {"state": {"x": {"kind": "optimizer", "value": 3}}, "outlines": []},
        {"state": {}, "outlines": 3},
        {"state": {}, "outlines": [["x", "F32", [2]]]},
        {"state": {}, "outlines": [["x", "F3", [2], []]]},
        {"state": {}, "outlines": [[1, 1, 1, 1]]},
    ],
)
def test_what_cannot_be_is_refused(value):
    state = {"layout": {"kind": "json", "value": value}}
    with pytest.raises(ckpt.CheckpointError, match="p.* says what cannot be"):
        Contents.of(state, "p")


def test_large_boxes_are_cut_and_the_widest_come_first():
    slices = _contents().slices()
    keys = ["x/c#0", "x/b#0", "x/b#1", "x/b#2", "x/a#0", "x/a#1"]
    assert [one.item.key for one in slices] == keys
    assert [one.nbytes // MB for one in slices] == [0, 16, 16, 4, 0, 0]
    assert all(lengths(one.box) == one.item.shape for one in slices)
    found = batches(slices, 20 * MB + 8)
    assert [len(one) for one in found] == [2, 3, 1]
    assert [one for batch in found for one in batch] == slices
    assert [len(one) for one in batches(slices, 1)] == [1] * 6


def test_a_save_is_complete_when_each_part_is_somewhere():
    old, new = SaveId(1, 20, 2), SaveId(2, 10, 3)
    held = [[PartId(old, 0), PartId(new, 0)], [PartId(old, 1), PartId(new, 2)]]
    assert complete_saves(held) == [old]
    assert complete_saves([*held, [PartId(new, 1)]]) == [new, old]
    assert complete_saves([]) == []


def test_damaged_parts_do_not_count_and_nothing_else_is_touched(tmp_path):
    tier = ckpt.LocalTier(tmp_path, copies=0, keep_last=5)
    for step in range(4):
        tier.save(step, {"x": torch.ones(4)})
    folders = sorted(tmp_path.iterdir())
    with open(folders[0] / "manifest.json", "r+b") as file:
        file.write(b"!")
    (folders[1] / "manifest.json").unlink()
    (folders[2] / "part.safetensors").write_bytes(b"")
    strange = [tmp_path / name for name in ("step-1", ".other.partial", "step-1.2.00000-of-1")]
    for path in strange:
        path.mkdir()
    found = survey(LocalPlace(tmp_path))
    assert [part.name for part in found.parts] == [folders[3].name]
    assert len(found.faults) == 3
    reasons = ["is damaged", "has no manifest.json", "has 0 bytes"]
    for fault, reason in zip(found.faults, reasons, strict=True):
        assert reason in fault
    left = tmp_path / f".{folders[3].name}.0123abcd.partial"
    left.mkdir()
    (left / "part.safetensors").write_bytes(b"half")
    remove_leftovers(LocalPlace(tmp_path))
    assert not left.exists()
    remove_others(LocalPlace(tmp_path), [])
    assert sorted(tmp_path.iterdir()) == sorted(strange)
    assert survey(LocalPlace(tmp_path / "missing")).parts == {}


def test_a_part_is_a_checkpoint_that_can_be_verified(tmp_path):
    tier = ckpt.LocalTier(tmp_path, group=LOCAL, copies=0)
    tier.save(7, {"x": torch.arange(5), "n": float("nan")})
    (part,) = tmp_path.iterdir()
    ckpt.verify(part)
    with open(part / "part.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    with pytest.raises(ckpt.CheckpointError, match="tensors/x/x#0"):
        ckpt.verify(part)


@pytest.mark.parametrize("time", [2**63 - 1, 2**63, 2**200])
def test_a_save_after_parts_of_the_last_time_there_can_be_is_found(tmp_path, time):
    state, tier = {"n": 1}, ckpt.LocalTier(tmp_path, copies=0, keep_last=2)
    tier.save(1, state)
    (part,) = survey(LocalPlace(tmp_path)).parts
    later = PartId(part.save._replace(saved_unix_ns=time), 0).name
    (tmp_path / part.name).rename(tmp_path / later)
    tier.save(2, state)
    assert tier.load_newest(state) == 2
