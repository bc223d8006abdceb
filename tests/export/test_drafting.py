"""What a folder in the making wants, writes and leaves behind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megablocks_core.export import slabs
from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.operations import Join
from megablocks_core.export.ours import Ours
from megablocks_core.groups import Whole

OURS = {
    "one": torch.tensor([1.0, 2.0]),
    "gate": torch.arange(6.0).view(2, 3),
    "up": torch.arange(6.0, 12.0).view(2, 3),
    "ids": torch.tensor([1, 2], dtype=torch.int32),
}


def draft_of(target=Path(), *, dtype=torch.float32, rank=0, num_ranks=1):
    ours = Ours(Whole(name, tuple(one.shape), one.dtype) for name, one in OURS.items())
    (both,) = Join((2, 2))([ours["gate"], ours["up"]])
    files = {
        "a.safetensors": [Written(Whole("first", (2,), dtype), ours["one"])],
        "b.safetensors": [Written(Whole("gate_up", (4, 3), dtype), both)],
        "c.safetensors": [
            Written(Whole("ids", (2,), torch.int32), ours["ids"]),
            Written(Whole("first", (2,), dtype), ours["one"]),  # a name is of its file alone
        ],
    }
    return FolderDraft(target, files, ours, rank=rank, num_ranks=num_ranks)


def write(target, *, dtype=torch.float32, ours=OURS):
    draft = draft_of(target, dtype=dtype)
    try:
        draft.open()
        for slab, boxes in draft.wanted()[0]:
            draft.add(slab, [ours[name][box] for name, box in boxes])
        draft.publish({"beside.json": b"{}"})
    finally:
        draft.close()


def test_files_hold_what_is_made_of_ours(tmp_path):
    write(tmp_path / "out")
    written = load_file(tmp_path / "out" / "c.safetensors")
    assert torch.equal(written["ids"], OURS["ids"]) and torch.equal(written["first"], OURS["one"])
    whole = load_file(tmp_path / "out" / "b.safetensors")["gate_up"]
    assert torch.equal(whole, torch.arange(12.0).view(4, 3))
    assert (tmp_path / "out" / "beside.json").read_bytes() == b"{}"


def test_files_are_the_same_bytes_in_slabs_of_any_size(tmp_path, monkeypatch):
    write(tmp_path / "whole", dtype=torch.float64)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 16)
    write(tmp_path / "slabs", dtype=torch.float64)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "slabs" / path.name).read_bytes()


def test_each_rank_wants_the_slabs_of_its_files_in_order(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 24)
    every = [
        {
            rank: [
                (slab.written.whole.name, slab.nbytes, [name for name, _ in boxes])
                for slab, boxes in found
            ]
            for rank, found in draft_of(rank=rank, num_ranks=2).wanted().items()
        }
        for rank in range(2)
    ]
    first = ("first", 8, ["one"])
    assert (
        every[0]
        == every[1]
        == {
            0: [first, ("ids", 8, ["ids"]), first],
            1: [("gate_up", 24, ["gate"]), ("gate_up", 24, ["up"])],
        }
    )


def test_what_is_not_finished_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="dtype=torch.float16 must hold the values of first"):
        write(tmp_path / "a", dtype=torch.float16, ours={**OURS, "one": torch.tensor([1.0, 1e6])})
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_must_see_the_files_of_all(tmp_path):
    draft = draft_of(tmp_path / "out", num_ranks=2)
    draft.open()
    for slab, boxes in draft.wanted()[0]:
        draft.add(slab, [OURS[name][box] for name, box in boxes])
    with pytest.raises(OSError, match=r"must see one folder: no \['b.safetensors'\]"):
        draft.publish({})
    draft.close()
    assert list(tmp_path.iterdir()) == []
