"""A folder that ranks write together has the bytes that one writes, or is not there."""

import signal
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.ours import Ours
from megablocks_core.export.writing import write_folder
from megablocks_core.groups import LOCAL, Collection, Held, Mesh, ShardSpec, interrupts_held
from megablocks_core.testing import ranks


def write(target, held, group, beside):
    collection = Collection(held, group=group, task="writing", raises=RuntimeError)
    ours = Ours(collection.wholes)
    files = {
        f"{whole.name}.safetensors": [Written(whole, ours[whole.name])]
        for whole in collection.wholes
    }
    draft = FolderDraft(target, files, ours, rank=group.rank, num_ranks=group.size)
    write_folder(draft, collection, beside, group=group, task="writing")


@ranks(2, 4)
def test_the_folder_is_that_of_one_rank(tmp_path):
    world = Mesh().group("dp")
    whole = {name: torch.arange(8.0) + place for place, name in enumerate("abc")}
    own = [
        Held(name, tensor.chunk(world.size)[world.rank], (ShardSpec(0, world),))
        for name, tensor in whole.items()
    ]
    write(tmp_path / "out", own, world, lambda: {"config.json": b"{}"})
    alone = tmp_path / f"alone-{world.rank}"
    write(alone, [Held(name, one) for name, one in whole.items()], LOCAL, dict)
    for path in alone.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"

    def fails():
        raise ValueError("nothing lies beside")

    with pytest.raises(ValueError, match="nothing lies beside"):
        write(tmp_path / "failed", own, world, fails)
    world.all_gather_object(None)
    assert not [path for path in tmp_path.iterdir() if "failed" in path.name]


@ranks(2)
def test_ctrl_c_while_the_first_rank_publishes_waits_until_it_has(tmp_path):
    """What is there cannot be taken back: no rank says that it failed."""
    world = Mesh().group("dp")
    own = [Held("a", torch.arange(8.0), ())]
    raised = pytest.raises(KeyboardInterrupt) if world.rank == 1 else nullcontext()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    visit = Collection.visit

    def visited(self, *arguments):
        visit(self, *arguments)
        if world.rank == 1:
            signal.raise_signal(signal.SIGINT)

    try:
        with patch.object(Collection, "visit", visited), raised, interrupts_held(group=world):
            write(tmp_path / "out", own, world, dict)
    finally:
        signal.signal(signal.SIGINT, before)
    world.all_gather_object(None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.safetensors"]
