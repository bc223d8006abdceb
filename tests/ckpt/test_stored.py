"""Any flipped bit and any cut is found, and the tensor is named."""

import pytest
import torch
import xxhash
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.local_place import LocalPlace, LocalSource
from megablocks_core.ckpt.manifest import BLOCK_BYTES
from megablocks_core.ckpt.stored import Stored, Target


def _saved(root):
    model = nn.Linear(3, 5)
    ckpt.save(root / "c", {"model": model, "step": 1})
    return root / "c", {"model": model, "step": 0}


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_flipped_bit_anywhere_is_found(tmp_path, file):
    folder, state = _saved(tmp_path)
    data = (folder / file).read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        (folder / file).write_bytes(flipped)
        with pytest.raises(ckpt.CheckpointError, match=file):
            ckpt.verify(folder)
        with pytest.raises(ckpt.CheckpointError, match=file):
            ckpt.load(folder, state)
    (folder / file).write_bytes(data)
    ckpt.verify(folder)
    ckpt.load(folder, state)


def test_verify_names_the_damaged_tensors(tmp_path):
    numel = BLOCK_BYTES // 4
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(numel)) for name in "abc"})
    ckpt.save(tmp_path / "c", {"model": model})
    path = tmp_path / "c" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[2 * BLOCK_BYTES + 1000] ^= 4
    path.write_bytes(data)
    with pytest.raises(ckpt.CheckpointError) as caught:
        ckpt.verify(tmp_path / "c")
    assert str(caught.value).endswith("in ['model/b', 'model/c']")
    with pytest.raises(ckpt.CheckpointError, match="block 2"):
        ckpt.load(tmp_path / "c", {"model": model})


def test_f_152_a_file_cut_short_is_named_with_both_sizes(tmp_path):
    folder, state = _saved(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for cut in (0, 1, len(data) - 1):
        path.write_bytes(data[:cut])
        message = f"model.safetensors has {cut} bytes, {len(data)} were written"
        for read in (ckpt.verify, lambda folder: ckpt.load(folder, state)):
            with pytest.raises(ckpt.CheckpointError, match=message):
                read(folder)
    path.unlink()
    with pytest.raises(ckpt.CheckpointError, match="model.safetensors is missing"):
        ckpt.load(folder, state)
    (folder / "manifest.json").unlink()
    with pytest.raises(ckpt.CheckpointError, match="has no manifest.json"):
        ckpt.load(folder, state)


def test_slices_are_those_of_the_whole(tmp_path):
    whole = torch.arange(4 * 6 * 5, dtype=torch.int16).view(4, 6, 5)
    ckpt.save(tmp_path / "c", {"x": whole, "scalar": torch.tensor(3)})
    stored = Stored(LocalPlace(tmp_path / "c")).tensors
    x = stored["x/x"]
    assert x.get_shape() == [4, 6, 5]
    for index in (
        (slice(1, 3), slice(0, 6), slice(0, 5)),
        (slice(0, 4), slice(2, 5), slice(1, 2)),
        (slice(2, 2), slice(0, 6), slice(0, 5)),
        (slice(1, 2),),
        ...,
    ):
        assert torch.equal(x[index], whole[index])
    assert stored["scalar/scalar"][...] == 3


def _filled(stored, targets):
    """The bytes that targets of these (offset, length) get."""
    memories = [Target(offset, memoryview(bytearray(length))) for offset, length in targets]
    stored.fill("x.safetensors", memories)
    return [bytes(target.memory) for target in memories]


@pytest.mark.parametrize(
    "targets",
    [
        [],
        [(3, 0)],
        [(0, 1)],
        [(BLOCK_BYTES - 3, 7)],
        [(5, 10), (15, 2), (100, 1), (BLOCK_BYTES, 5), (3 * BLOCK_BYTES - 1, 2)],
        [(8 * n, 3) for n in range(200)],
        [(100, 2 * BLOCK_BYTES + 5), (3 * BLOCK_BYTES + 1000, 20)],
    ],
)
def test_targets_get_their_bytes_and_nothing_else_is_read(tmp_path, monkeypatch, targets):
    ckpt.save(tmp_path / "c", {"x": torch.randn(BLOCK_BYTES // 4 * 3 + 500)})
    data = (tmp_path / "c" / "x.safetensors").read_bytes()
    stored, seen = Stored(LocalPlace(tmp_path / "c")), []
    real = LocalSource.read

    def noted(self, parts, offset):
        seen.append((offset, sum(part.nbytes for part in parts)))
        real(self, parts, offset)

    monkeypatch.setattr(LocalSource, "read", noted)
    expected = [data[offset : offset + length] for offset, length in targets]
    assert _filled(stored, targets) == expected
    touched = {
        block
        for offset, length in targets
        for block in range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)
        if length
    }
    ends = [min((block + 1) * BLOCK_BYTES, len(data)) for block in sorted(touched)]
    starts = [block * BLOCK_BYTES for block in sorted(touched)]
    assert sorted(seen) == [(at, end - at) for at, end in zip(starts, ends, strict=True)]


def test_a_block_whose_bytes_no_tensor_has_is_checked(tmp_path):
    model = nn.ParameterDict({f"{n}" * 240: nn.Parameter(torch.ones(1)) for n in range(10)})
    ckpt.save(tmp_path / "c", {"model": model})
    stored = Stored(LocalPlace(tmp_path / "c"))
    stored.check_rest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.ckpt.stored.BLOCK_BYTES", 512)
        (record,) = stored.manifest.files.values()
        data = (tmp_path / "c" / "model.safetensors").read_bytes()
        hashes = [xxhash.xxh3_128_hexdigest(data[at : at + 512]) for at in range(0, len(data), 512)]
        record.xxh3_128[:] = hashes
        stored.check_rest()
        record.xxh3_128[1] = "0" * 32
        with pytest.raises(ckpt.CheckpointError, match="block 1"):
            stored.check_rest()
