"""Tensors that ``torch.save`` wrote are found in a file without reading their values."""

import io
import zipfile

import pytest
import torch
from torch import nn

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.tools.torch_zip import SavedTensor, Window, check_object, find_tensor
from megablocks_core.files.safetensors import DTYPE_CODES


class Bytes:
    """A source in memory; counts what is read."""

    def __init__(self, data):
        self.data, self.count = data, 0

    def read(self, parts, offset):
        for part in parts:
            data = self.data[offset : offset + part.nbytes]
            if len(data) != part.nbytes:
                raise EOFError("the file ends too early")
            part[:] = data
            offset += part.nbytes
            self.count += part.nbytes

    def close(self):
        pass


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def found(data) -> SavedTensor:
    return find_tensor(Bytes(b"abc" + data + b"xyz"), 3, len(data), "it")


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_dtype_is_where_it_says(dtype):
    values = torch.arange(1, 7).to(dtype).reshape(2, 3)
    data = saved(values)
    one = found(data)
    assert (one.dtype, one.shape, one.strides, one.is_plain) == (dtype, (2, 3), (3, 1), True)
    held = (b"abc" + data)[one.offset : one.offset + one.nbytes]
    assert held == values.view(torch.uint8).numpy().tobytes()


def test_views_and_parameters():
    assert found(saved(nn.Parameter(torch.ones(2, 2)))).shape == (2, 2)
    turned = found(saved(torch.ones(2, 3).T))
    assert (turned.shape, turned.strides, turned.is_plain) == ((3, 2), (1, 3), False)
    part = found(saved(torch.arange(9)[4:6]))
    assert (part.first, part.shape, part.nbytes, part.is_plain) == (4, (2,), 72, False)
    assert found(saved(torch.empty(0, 3))).shape == (0, 3)


def test_values_are_not_read():
    data = saved(torch.ones(1_000_000))
    source = Bytes(data)
    find_tensor(source, 0, len(data), "it")
    assert source.count < 200_000


def test_other_things_are_refused():
    numbers = torch.complex(torch.ones(1), torch.ones(1))
    for value in ({"a": torch.ones(2)}, [1], 3, torch.float32, numbers):
        with pytest.raises(CheckpointError, match="it "):
            found(saved(value))


def test_no_damage_is_taken_for_a_tensor():
    whole = saved(torch.arange(8.0))
    for length in range(0, len(whole), 7):
        with pytest.raises(CheckpointError):
            found(whole[:length])
    # A storage that is shorter than the tensor says.
    short = whole.replace(b"K\x08\x85", b"K\x09\x85")
    assert short != whole
    with pytest.raises(CheckpointError, match="longer than its storage"):
        found(short)


def test_a_storage_is_not_read_as_more_than_it_is():
    for value in (torch.ones(1).expand(2**30), torch.ones(5).as_strided((3, 3), (1, 1))):
        with pytest.raises(CheckpointError, match="longer than its storage"):
            found(saved(value))
    odd = saved(torch.arange(6, dtype=torch.int8)[:1]).replace(b"CharStorage", b"LongStorage")
    with pytest.raises(CheckpointError, match="longer than its storage of 6 bytes"):
        found(odd)


def test_an_object_that_unpacks_to_more_is_refused():
    check_object(saved([1, {"a": 2}]), "it")
    with pytest.raises(CheckpointError, match="it is damaged"):
        check_object(b"\x80\x02]q\x00.", "it")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 2**20 + b"N.")
        archive.writestr("archive/version", b"3\n")
    assert len(packed.getvalue()) < 10_000
    with pytest.raises(CheckpointError, match="it is compressed"):
        check_object(packed.getvalue(), "it")


def test_a_window_is_a_file():
    window = Window(Bytes(b"0123456789"), 2, 5)
    assert window.readable() and window.seekable()
    assert window.read() == b"23456" and window.tell() == 5
    assert window.seek(-2, 2) == 3 and window.read(9) == b"56"
    assert window.seek(0) == 0 and window.seek(1, 1) == 1
    with pytest.raises(ValueError, match="before the start"):
        window.seek(-1)
