"""Any flipped bit and any cut in any file is found, and the tensor is named."""

import json
import warnings

import pytest
import torch
import xxhash
from torch import nn

from megablocks_core import ckpt
from megablocks_core.ckpt.format.manifest_reading import read_manifest
from megablocks_core.ckpt.manifest import BLOCK_BYTES, FileRecord
from megablocks_core.ckpt.places.local_place import LocalPlace
from megablocks_core.groups import Mesh, ShardSpec, mark
from megablocks_core.testing import ranks


def _saved(root):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    ckpt.save(root / "c", state, files={"config.json": {"a": 1}})
    return root / "c", state


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    folder, state = _saved(tmp_path)
    files = sorted(path.name for path in folder.iterdir())
    assert {"manifest.json", "config.json", "model.safetensors"} < set(files)
    assert len(files) == 4
    for file in files:
        data = (folder / file).read_bytes()
        for place in range(0, len(data), 1 if file == "model.safetensors" else 5):
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


def test_a_flipped_bit_in_latest_never_leads_astray(tmp_path):
    for step in (1, 2):
        ckpt.save(tmp_path / f"step-{step}", {"step": step})
    data = (tmp_path / "LATEST").read_bytes()
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        (tmp_path / "LATEST").write_bytes(flipped)
        with pytest.warns(match="LATEST"):
            assert ckpt.latest(tmp_path) == tmp_path / "step-2"


@ranks(2)
def test_a_flipped_bit_in_the_index_of_many_files_is_found(tmp_path):
    world = Mesh().group("dp")
    model = nn.ParameterDict({name: torch.ones(4, 2) for name in "abcd"})
    for name in "abcd":
        mark(model, name, ShardSpec(0, world))
    ckpt.save(tmp_path / "c", {"model": model}, group=world)
    for file in ("model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        path = tmp_path / "c" / file
        data = path.read_bytes()
        for place in range(0, len(data), 40):
            world.barrier()
            if world.rank == 0:
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            world.barrier()
            with pytest.raises(ckpt.CheckpointError, match=file):
                ckpt.load(tmp_path / "c", {"model": model}, group=world)
        world.barrier()
        if world.rank == 0:
            path.write_bytes(data)
        world.barrier()
    ckpt.load(tmp_path / "c", {"model": model}, group=world)


def test_the_damaged_tensors_are_named(tmp_path):
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


def test_progress_hears_of_every_byte_of_every_file(tmp_path):
    ckpt.save(tmp_path / "c", {"x": torch.zeros(BLOCK_BYTES // 2), "y": torch.zeros(3)})
    total = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    heard = []
    ckpt.verify(tmp_path / "c", progress=lambda *both: heard.append(both))
    assert [done for done, _ in heard[:2]] == [BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert heard[-1] == (total, total) and len(heard) == 4
    assert all(of == total for _, of in heard)


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


def _forged(folder, change):
    """Change a file's header and make the manifest vouch for it."""
    path = folder / "x.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode())
    data = len(text).to_bytes(8, "little") + text.encode() + data[8 + length :]
    path.write_bytes(data)
    manifest = read_manifest(LocalPlace(folder))
    manifest.files["x.safetensors"] = FileRecord(len(data), [xxhash.xxh3_128_hexdigest(data)])
    (folder / "manifest.json").write_text(manifest.text())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F32", "I32", "differs from the manifest"),
        ("[2,3]", "[3,2]", "differs from the manifest"),
        ("[0,24]", "[4,28]", r"'x' must begin at 0, not at 4"),
        ("{", "[", "is not JSON"),
    ],
)
def test_a_header_that_says_something_else_is_found(tmp_path, old, new, message):
    ckpt.save(tmp_path / "c", {"x": torch.ones(2, 3)})
    _forged(tmp_path / "c", lambda text: text)
    ckpt.verify(tmp_path / "c")
    _forged(tmp_path / "c", lambda text: text.replace(old, new, 1))
    with pytest.raises(ckpt.CheckpointError, match=f"x.safetensors.*{message}"):
        ckpt.verify(tmp_path / "c")


def test_what_is_verified_is_json_and_safetensors(tmp_path):
    folder, _ = _saved(tmp_path)
    with warnings.catch_warnings(action="error"):
        ckpt.verify(str(folder))
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
