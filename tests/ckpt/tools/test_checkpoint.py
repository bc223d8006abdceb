"""What is known of a tensor, and the slabs it is read in."""

import torch

from megablocks_core.ckpt.tools import checkpoint
from megablocks_core.ckpt.tools.checkpoint import Held, read_whole
from megablocks_core.ckpt.tools.opening import open_checkpoint
from tests.ckpt.tools.saves import save_ours


def test_slabs_cover_a_tensor_and_are_bounded(monkeypatch):
    monkeypatch.setattr(checkpoint, "SLAB_BYTES", 48)
    held = Held(torch.float32, (3, 2, 7))
    seen = torch.zeros(held.shape)
    for box in held.slabs():
        seen[box] += 1
        assert seen[box].numel() * 4 <= 48
    assert held.nbytes == 168 and (seen == 1).all()
    assert list(Held(torch.int64, ()).slabs()) == [()]


def test_read_whole(tmp_path):
    save_ours(tmp_path / "c")
    opened = open_checkpoint(tmp_path / "c")
    assert read_whole(opened, "model/0.weight").shape == (10, 6)
