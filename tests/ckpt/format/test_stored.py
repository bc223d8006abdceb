"""Blocks are read once, straight into the given memory, and checked before they count."""

import pytest
import torch
import xxhash
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.format.stored import Stored, Target
from megablocks_core.ckpt.manifest import BLOCK_BYTES
from megablocks_core.ckpt.places.local_place import LocalPlace, LocalSource


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
    sizes = [min(BLOCK_BYTES, len(data) - block * BLOCK_BYTES) for block in touched]
    assert {at // BLOCK_BYTES for at, _ in seen} == touched
    assert sum(length for _, length in seen) == sum(sizes)


def test_a_block_whose_bytes_no_tensor_has_is_checked(tmp_path):
    model = nn.ParameterDict({f"{n}" * 240: nn.Parameter(torch.ones(1)) for n in range(10)})
    ckpt.save(tmp_path / "c", {"model": model})
    stored = Stored(LocalPlace(tmp_path / "c"))
    stored.check_rest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megablocks_core.ckpt.format.stored.BLOCK_BYTES", 512)
        (record,) = stored.manifest.files.values()
        data = (tmp_path / "c" / "model.safetensors").read_bytes()
        hashes = [xxhash.xxh3_128_hexdigest(data[at : at + 512]) for at in range(0, len(data), 512)]
        record.xxh3_128[:] = hashes
        stored.check_rest()
        record.xxh3_128[1] = "0" * 32
        with pytest.raises(ckpt.CheckpointError, match="block 1"):
            stored.check_rest()


def test_damage_in_any_part_of_a_block_is_found(tmp_path):
    ckpt.save(tmp_path / "c", {"x": torch.randn(3000)})
    path = tmp_path / "c" / "x.safetensors"
    data = bytearray(path.read_bytes())
    stored = Stored(LocalPlace(tmp_path / "c"))
    for place in range(0, len(data), 997):
        data[place] ^= 16
        path.write_bytes(data)
        for targets in ([(1000, 10)], [(8 * n, 3) for n in range(200)]):
            with pytest.raises(ckpt.CheckpointError, match=r"damaged: block 0 \(from byte 0\)"):
                _filled(stored, targets)
        data[place] ^= 16
    path.write_bytes(data)
    assert stored.bytes_of("x.safetensors", 0, len(data)) == data
    path.write_bytes(data[:-1])
    with pytest.raises(ckpt.CheckpointError, match="ends before byte"):
        stored.bytes_of("x.safetensors", 5, 7)
