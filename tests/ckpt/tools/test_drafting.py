"""A checkpoint whose tensors come one at a time is whole, or is not there."""

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.drafting import write_checkpoint
from megablocks_core.files.progress import Progress

STATE = {"x": {"kind": "tensor"}, "step": {"kind": "json", "value": 3}}


def write(path, read):
    tensors = {"x/x": Held(torch.bfloat16, (5,))}
    files = {"config.json": b"{}"}
    write_checkpoint(path, STATE, tensors, read, files=files, progress=Progress("", 1))


def test_what_was_written_loads(tmp_path):
    values = torch.arange(5).bfloat16()
    write(tmp_path / "c", lambda name: values)
    state = {"x": torch.zeros(5, dtype=torch.bfloat16), "step": 0}
    ckpt.load(tmp_path / "c", state)
    ckpt.verify(tmp_path / "c")
    assert torch.equal(state["x"], values) and state["step"] == 3
    assert (tmp_path / "c" / "config.json").read_bytes() == b"{}"


def test_a_failure_leaves_nothing(tmp_path):
    def fail(name):
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write(tmp_path / "c", fail)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").touch()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        write(tmp_path / "c", lambda name: torch.zeros(5).bfloat16())
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["mine"]
