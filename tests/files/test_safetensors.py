"""What is written tensor by tensor, the safetensors library reads; headers are not believed."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megablocks_core.files.safetensors import (
    DTYPE_CODES,
    Entry,
    SafetensorsWriter,
    layout,
    read_header,
)
from megablocks_core.groups import Whole


@pytest.mark.parametrize("backwards", [False, True])
def test_safetensors_reads_every_dtype(backwards, tmp_path):
    tensors = {
        str(dtype): torch.arange(1, 4).to(dtype)
        for dtype in sorted(DTYPE_CODES, key=lambda dtype: -dtype.itemsize)
    }
    tensors["scalar"] = torch.tensor(True)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.uint8)
    wholes = [Whole(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    wholes, names = (wholes[::-1], [*tensors][::-1]) if backwards else (wholes, [*tensors])
    writer = SafetensorsWriter(tmp_path / "f", wholes, metadata={"format": "pt"})
    widest_first = sorted(wholes, key=lambda whole: -whole.dtype.itemsize)
    planned = layout(widest_first, {"format": "pt"})
    for name in names:
        assert not writer.is_complete
        for part in tensors[name].reshape(-1).split(2):  # an empty one comes once as well
            writer.write(name, part)
    assert writer.is_complete
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


def _file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _read(data):
    return read_header(lambda start, stop: data[start:stop], len(data))


def test_a_header_is_read():
    wholes = [Whole("a", (2, 3), torch.float32), Whole("b", (), torch.bool)]
    wholes += [Whole("empty", (0, 5), torch.uint8)]
    planned = layout(wholes, {"format": "pt"})
    data = planned.header + bytes(planned.size - len(planned.header))
    assert _read(data) == {
        "a": Entry("F32", (2, 3), planned.offsets["a"]),
        "b": Entry("BOOL", (), planned.offsets["b"]),
        "empty": Entry("U8", (0, 5), planned.offsets["empty"]),
    }
    assert _read(_file({})) == {}
    assert _read(_file({"__metadata__": {}})) == {}


_GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be in a file of 0"),
        (b"1234567", "cannot be in a file of 7"),
        (_file({}, length=0), "a header of 0 bytes cannot be"),
        (_file({}, length=3), "a header of 3 bytes cannot be in a file of 10"),
        (_file({}, length=2**63), "cannot be in a file"),
        (_file(b"{]"), "is not JSON"),
        (_file(b"\xff\xff"), "is not JSON"),
        (_file(b"[" * 10**5), "is not JSON"),
        (_file([1]), "is not an object"),
        (_file(b'{"a":1,"a":1}'), "'a' must come once"),
        (_file({"__metadata__": []}), "__metadata__ must hold texts by name, not"),
        (_file({"__metadata__": {"format": 1}}), "__metadata__ must hold texts by name, not"),
        (_file({"__metadata__": "x" * 999}), "__metadata__ must hold texts by name, not x{99}$"),
        (_file({"a": 1}), "entry of 'a' cannot be: 1"),
        (_file({"a": _GOOD | {"shape": [1] * 64 + [2]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"dtype": "U9"}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"dtype": ["U8"]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"shape": [-2]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"shape": [2.0]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"shape": [2**62, 2**62]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"data_offsets": [2, 0]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"data_offsets": [0, 2, 4]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"data_offsets": [True, 3]}}, b"12"), "entry of 'a' cannot be"),
        (_file({"a": _GOOD | {"data_offsets": [10**12, 10**12 + 2]}}, b"12"), "must begin at 0"),
        (_file({"a": _GOOD, "b": _GOOD}, b"12"), "'b' must begin at 2, not at 0"),
        (_file({"a": _GOOD}, b"1"), "fill 2 bytes of 1"),
        (_file({"a": _GOOD}, b"123"), "fill 2 bytes of 3"),
    ],
)
def test_a_header_that_cannot_be_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        _read(data)
