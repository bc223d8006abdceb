"""What threads write is a safetensors file, hashed block by block; an error of any is raised."""

import time
import weakref

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from megablocks_core.ckpt.format.writing import FileToWrite, Item, Writer
from megablocks_core.ckpt.manifest import BLOCK_BYTES, Chunk, FileRecord, StoredAs
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.files import disk


def _item(key, tensor, start=None, whole=None):
    shape = tuple(tensor.shape)
    return Item(key, f"e/{key}", tensor.dtype, start or (0,) * len(shape), shape, whole or shape)


def _write(folder, tensors):
    writer = Writer(
        LocalPlace(folder), [FileToWrite("f", [_item(*one) for one in tensors.items()])]
    )
    try:
        for key, tensor in tensors.items():
            writer.add("f", key, tensor)
        return writer.finish()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [1, 5],
        [BLOCK_BYTES // 4] * 3,
        [3 * BLOCK_BYTES // 4 - 7, 1, 0, 2 * BLOCK_BYTES // 4],
        [3] * 500,
    ],
)
def test_files_are_safetensors_with_a_hash_for_each_block(tmp_path, lengths):
    tensors = {str(n): torch.randn(length) for n, length in enumerate(lengths)}
    receipt = _write(tmp_path, tensors)
    data = (tmp_path / "f").read_bytes()
    starts = range(0, len(data), BLOCK_BYTES)
    hashes = [xxhash.xxh3_128_hexdigest(data[at : at + BLOCK_BYTES]) for at in starts]
    assert receipt.files == {"f": FileRecord(len(data), hashes)}
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)
        (chunk,) = receipt.tensors[f"e/{key}"].chunks
        raw = data[chunk.offset : chunk.offset + 4 * len(tensor)]
        assert raw == tensor.numpy().tobytes()
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_strides_and_pieces_of_a_tensor(tmp_path):
    whole = torch.arange(20.0).view(4, 5)
    left, right = whole[:, :2], whole[:, 2:].flip(1).flip(1)
    files = [
        FileToWrite("f", [_item("x#0", left, (0, 0), (4, 5))._replace(name="e/x")]),
        FileToWrite("g", [_item("x#1", right, (0, 2), (4, 5))._replace(name="e/x")]),
    ]
    writer = Writer(LocalPlace(tmp_path), files)
    writer.add("g", "x#1", right)
    writer.add("f", "x#0", left)
    stored = writer.finish().tensors["e/x"]
    assert (stored.dtype, stored.shape) == ("F32", (4, 5))
    assert [(part.file, part.start, part.shape) for part in stored.chunks] == [
        ("g", (0, 2), (4, 3)),
        ("f", (0, 0), (4, 2)),
    ]
    assert torch.equal(load_file(tmp_path / "f")["x#0"], left)
    assert torch.equal(load_file(tmp_path / "g")["x#1"], right)


@pytest.mark.parametrize("call", ["write", "sync"])
def test_the_error_of_any_thread_is_raised(tmp_path, monkeypatch, call):
    real, seen = getattr(disk, call), 0

    def failing(*args):
        nonlocal seen
        seen += 1
        if call == "sync" or args[2] == 5 * BLOCK_BYTES:
            raise OSError(5, "Input/output error")
        return real(*args)

    monkeypatch.setattr(disk, call, failing)
    tensors = {str(n): torch.zeros(BLOCK_BYTES // 2) for n in range(30)}
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path, tensors)
    assert seen == 1 if call == "sync" else 6 <= seen < 60


def test_a_file_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError):
        _write(tmp_path, {"x": torch.ones(1)})
    assert (tmp_path / "f").read_text() == "old"


def test_the_receipt_says_what_the_whole_is(tmp_path):
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    receipt = _write(tmp_path, {"x": tensor})
    offset = receipt.files["f"].size - 12
    assert receipt.tensors == {
        "e/x": StoredAs("BF16", (2, 3), [Chunk("f", offset, (0, 0), (2, 3))])
    }


@pytest.mark.parametrize("tail", [400, 2**20])
def test_a_tensor_is_let_go_once_it_is_written(tmp_path, tail):
    class Buffer(bytearray):
        pass

    buffer = Buffer(BLOCK_BYTES + tail)
    gone = weakref.ref(buffer)
    tensors = {"a": torch.frombuffer(buffer, dtype=torch.float32), "b": torch.ones(3)}
    items = [_item(*one) for one in tensors.items()]
    writer = Writer(LocalPlace(tmp_path), [FileToWrite("f", items)])
    writer.add("f", "a", tensors.pop("a"))
    del buffer
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None, "the part of a block that waits for the next tensor keeps this one"
    writer.add("f", "b", tensors["b"])
    writer.finish()
    assert torch.equal(load_file(tmp_path / "f")["b"], tensors["b"])
