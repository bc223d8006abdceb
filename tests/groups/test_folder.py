"""A folder of safetensors files appears whole or not at all."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megablocks_core.groups.collect import Whole
from megablocks_core.groups.folder import CODES, NewFolder, SafetensorsWriter


def test_safetensors_reads_every_dtype(tmp_path):
    tensors = {
        str(dtype): torch.arange(1, 4).to(dtype)
        for dtype in sorted(CODES, key=lambda dtype: -dtype.itemsize)
    }
    tensors["scalar"] = torch.tensor(True)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.uint8)
    wholes = [Whole(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    seen = []
    writer = SafetensorsWriter(
        tmp_path / "f", wholes, metadata={"format": "pt"}, observe=lambda b: seen.append(bytes(b))
    )
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()

    data = (tmp_path / "f").read_bytes()
    assert b"".join(seen) == data
    loaded = load_file(tmp_path / "f")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == raw
        assert data[writer.offsets[name] :][: len(raw)] == raw
        assert writer.offsets[name] % tensor.dtype.itemsize == 0
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_folder_appears_when_published_only(tmp_path):
    target = tmp_path / "deep" / "run" / "step-1"
    folder = NewFolder(target)
    (folder.staging / "a").write_text("a")
    assert not target.exists()
    folder.publish()
    folder.discard()
    assert [path.name for path in target.parent.iterdir()] == ["step-1"]
    assert (target / "a").read_text() == "a"


def test_discarded_and_withdrawn_folders_leave_nothing(tmp_path):
    for published in (False, True):
        folder = NewFolder(tmp_path / "step-1")
        (folder.staging / "a").write_text("a")
        if published:
            folder.publish()
        folder.withdraw()
        folder.discard()
        assert not any(tmp_path.iterdir())


def test_empty_target_is_accepted_and_others_refused(tmp_path):
    target = tmp_path / "step-1"
    target.mkdir()
    folder = NewFolder(target)
    folder.publish()
    late = NewFolder(target)
    (target / "a").write_text("a")
    with pytest.raises(OSError):
        late.publish()
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        NewFolder(target)
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        NewFolder(target / "a")
    assert (target / "a").read_text() == "a"
