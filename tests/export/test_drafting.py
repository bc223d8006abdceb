"""What a folder in the making plans, writes and refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megablocks_core.export import slabs
from megablocks_core.export.drafting import HfDraft, name_dtype, planned
from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.operations import Split
from megablocks_core.groups import Whole

LAYOUT = Layout(
    (
        Rule({"first": (2,)}, ("one",)),
        Rule({"gate_up": (4, 3)}, ("gate", "up"), (Split((2, 2)),)),
        Rule({"ids": (2,)}, ("ids",)),
    )
)
OURS = {
    "one": torch.tensor([1.0, 2.0]),
    "gate": torch.arange(6.0).view(2, 3),
    "up": torch.arange(6.0, 12.0).view(2, 3),
    "ids": torch.tensor([1, 2], dtype=torch.int32),
}
WHOLES = [Whole(name, tuple(tensor.shape), tensor.dtype) for name, tensor in OURS.items()]


def write(target, *, dtype=None, max_file_bytes=100, ours=OURS):
    wholes = planned(WHOLES, LAYOUT, dtype)
    draft = HfDraft(target, wholes, LAYOUT, max_file_bytes)
    config = {}
    name_dtype(config, wholes)
    try:
        draft.open()
        for slab, boxes in draft.wanted()[0]:
            draft.add(slab, [ours[name][box] for name, box in boxes])
        draft.publish(config, None)
    finally:
        draft.close()


def test_parts_become_the_tensors_of_the_files(tmp_path):
    assert [whole.name for whole in planned(WHOLES, LAYOUT, None)] == ["first", "gate_up", "ids"]
    write(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["gate_up"], torch.arange(12.0).view(4, 3))
    assert torch.equal(written["ids"], OURS["ids"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"dtype": "float32", "torch_dtype": "float32"}


def test_files_end_before_they_grow_too_long(tmp_path):
    write(tmp_path / "out", max_file_bytes=56, dtype=torch.float64)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 16 + 96 + 8}
    files = ["first", "gate_up", "ids"]
    assert index["weight_map"] == {
        name: f"model-{number:05}-of-00003.safetensors" for number, name in enumerate(files, 1)
    }
    whole = load_file(tmp_path / "out" / "model-00002-of-00003.safetensors")["gate_up"]
    assert whole.dtype == torch.float64


def test_what_the_layout_does_not_say_is_refused():
    strange = [*WHOLES[:2], Whole("ids", (3,), torch.int32), Whole("more", (1,), torch.float32)]
    with pytest.raises(ValueError) as caught:
        planned(strange, LAYOUT, None)
    for part in ("missing ['gate_up']", "not described ['more']", "ids has shape (3,), described"):
        assert part in str(caught.value)


def test_files_are_the_same_bytes_in_slabs_of_any_size(tmp_path, monkeypatch):
    write(tmp_path / "whole", dtype=torch.float64)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 16)
    write(tmp_path / "slabs", dtype=torch.float64)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "slabs" / path.name).read_bytes()


def test_each_rank_wants_the_slabs_of_its_files_in_order(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 24)
    wholes = planned(WHOLES, LAYOUT, None)
    drafts = [HfDraft(Path(), wholes, LAYOUT, 50, rank=rank, num_ranks=2) for rank in range(2)]
    every = [
        {
            rank: [(slab.name, slab.nbytes, [name for name, _ in boxes]) for slab, boxes in found]
            for rank, found in draft.wanted().items()
        }
        for draft in drafts
    ]
    assert (
        every[0]
        == every[1]
        == {
            0: [("first", 8, ["one"]), ("ids", 8, ["ids"])],
            1: [("gate_up", 24, ["gate"]), ("gate_up", 24, ["up"])],
        }
    )


def test_what_is_not_finished_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="dtype=torch.float16 must hold the values of first"):
        write(tmp_path / "a", dtype=torch.float16, ours={**OURS, "one": torch.tensor([1.0, 1e6])})
    assert list(tmp_path.iterdir()) == []
