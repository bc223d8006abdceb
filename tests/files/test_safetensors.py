"""What is written tensor by tensor, the safetensors library reads."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megablocks_core.files.safetensors import DTYPE_CODES, SafetensorsWriter, layout
from megablocks_core.groups import Whole


def test_safetensors_reads_every_dtype(tmp_path):
    tensors = {
        str(dtype): torch.arange(1, 4).to(dtype)
        for dtype in sorted(DTYPE_CODES, key=lambda dtype: -dtype.itemsize)
    }
    tensors["scalar"] = torch.tensor(True)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.uint8)
    wholes = [Whole(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    writer = SafetensorsWriter(tmp_path / "f", wholes, metadata={"format": "pt"})
    planned = layout(wholes, {"format": "pt"})
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()

    data = (tmp_path / "f").read_bytes()
    assert data.startswith(planned.header) and len(data) == planned.size
    loaded = load_file(tmp_path / "f")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == raw
        assert data[planned.offsets[name] :][: len(raw)] == raw
        assert planned.offsets[name] % tensor.dtype.itemsize == 0
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}
