"""Tensors and objects of a real DCP folder, on any number of ranks; damage is found."""

import pickle
import random
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.tools import dcp_reading
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.testing import ranks
from tests.ckpt.tools.saves import RUN, full, quiet_save, save_dcp, trained
from tests.ckpt.tools.test_safe_pickle import Exploit


def whole(folder, key):
    return folder.read(key, tuple(slice(0, size) for size in folder.index.tensors[key].shape))


@ranks(1, 2, 4)
def test_every_box_of_what_ranks_wrote(tmp_path):
    model, optimizer = trained(cut=True)
    save_dcp(tmp_path / "c", model, optimizer)
    weight = full(model[0].weight)
    moment = full(optimizer.state[model[2].weight]["exp_avg_sq"])
    if dist.get_rank() == 0:
        folder = DcpFolder(place_of(tmp_path / "c"))
        assert len(folder.index.chunks["model.0.weight"]) == dist.get_world_size()
        assert torch.equal(whole(folder, "model.0.weight"), weight)
        assert torch.equal(whole(folder, "optimizer.state.2.weight.exp_avg_sq"), moment)
        for box in ((slice(1, 8), slice(2, 5)), (slice(9, 10), slice(0, 6))):
            assert torch.equal(folder.read("model.0.weight", box), weight[box])
        assert whole(folder, "optimizer.state.0.weight.step") == 2
        assert folder.object("run.spec.1.a") == RUN["spec"][1]["a"]
        assert set(folder.files()) == {path.name for path in (tmp_path / "c").glob("*.distcp")}


def test_tensors_of_other_strides(tmp_path):
    values = {"t": torch.arange(6.0).reshape(2, 3).T, "v": torch.arange(9)[3:7]}
    values["channels"] = (
        torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    )
    quiet_save(values, tmp_path / "c")
    folder = DcpFolder(place_of(tmp_path / "c"))
    for key, value in values.items():
        assert torch.equal(whole(folder, key), value)
    box = (slice(1, 3), slice(1, 2))
    assert torch.equal(folder.read("t", box), values["t"][box])


def test_a_view_that_was_saved_with_all_its_storage(tmp_path):
    """torch's writer copies views first; another writer need not."""
    quiet_save({"v": torch.arange(4)}, tmp_path / "c")
    path = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    torch.save(torch.arange(9)[3:7], tmp_path / "c" / "other")
    for info in metadata.storage_data.values():
        info.relative_path, info.offset = "other", 0
        info.length = (tmp_path / "c" / "other").stat().st_size
    path.write_bytes(pickle.dumps(metadata))
    assert whole(DcpFolder(place_of(tmp_path / "c")), "v").tolist() == [3, 4, 5, 6]


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_reading, "SLAB_BYTES", 100)
    values = torch.arange(100.0)
    quiet_save({"x": values}, tmp_path / "c")
    path = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    assert torch.equal(whole(DcpFolder(place_of(tmp_path / "c")), "x"), values)
    data[data.index(values.numpy().tobytes()) + 33] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'x' in .*__0_0.distcp is damaged: its CRC-32"):
        whole(DcpFolder(place_of(tmp_path / "c")), "x")


def test_no_damaged_byte_changes_a_value_or_raises_anything_else(tmp_path):
    values = torch.arange(8.0)
    quiet_save({"n": 3, "x": values}, tmp_path / "c")
    path = tmp_path / "c" / "__0_0.distcp"
    data, draw, found = path.read_bytes(), random.Random(0), 0
    for _ in range(600):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(damaged)
        folder = DcpFolder(place_of(tmp_path / "c"))
        try:
            assert torch.equal(whole(folder, "x"), values)
        except CheckpointError:
            found += 1
        with suppress(CheckpointError), warnings.catch_warnings(action="ignore"):
            folder.object("n")  # has no checksum
    assert 60 < found < 540


def test_archives_without_a_crc_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        quiet_save({"x": torch.arange(9.0)}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(whole(DcpFolder(place_of(tmp_path / "c")), "x"), torch.arange(9.0))


def test_files_that_are_missing_or_cut_short_are_named(tmp_path):
    quiet_save({"n": 3, "x": torch.ones(1000)}, tmp_path / "c")
    path = tmp_path / "c" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:3000])
    folder = DcpFolder(place_of(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="'x' in .*distcp"):
        whole(folder, "x")
    path.unlink()
    for read in (lambda: whole(folder, "x"), lambda: folder.object("n"), folder.files):
        with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
            read()
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="has no .metadata"):
        DcpFolder(place_of(tmp_path / "c"))


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    quiet_save({"x": torch.ones(10)}, tmp_path / "a")
    quiet_save({"x": torch.ones(5, 2)}, tmp_path / "b")
    for name in ("__0_0.distcp",):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"holds torch.float32 \(5, 2\), not .* \(10,\)"):
        whole(DcpFolder(place_of(tmp_path / "a")), "x")


def test_exploits_in_objects_and_in_tensors_do_nothing(tmp_path):
    ran = tmp_path / "ran"
    quiet_save({"n": Exploit(f"touch {ran}"), "x": torch.ones(3)}, tmp_path / "c")
    folder = DcpFolder(place_of(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="'n' in .* is not read"):
        folder.object("n")
    path = tmp_path / "c" / "__0_0.distcp"
    data = path.read_bytes()
    start = data.rindex(b"\x80\x02ctorch._utils")
    call = pickle.dumps(Exploit(f"touch {ran}"), 2)
    path.write_bytes(data[:start] + call + data[start + len(call) :])
    with pytest.raises(CheckpointError, match="it names posix.system"):
        whole(DcpFolder(place_of(tmp_path / "c")), "x")
    assert not ran.exists()


@pytest.mark.parametrize(("times", "wraps"), [(60, 0), (0, 300)])
def test_objects_that_hold_more_than_their_bytes_are_refused(tmp_path, times, wraps):
    value = ["a"]
    for _ in range(times):
        value = [value, value]
    for _ in range(wraps):
        value = [value]
    quiet_save({"n": (value, 3), "x": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="'n.*' in .* holds more values, or deeper ones"):
        folder = DcpFolder(place_of(tmp_path / "c"))
        [folder.object(key) for key in folder.index.objects]


def test_metadata_that_is_too_long_is_not_read(tmp_path):
    quiet_save({"x": torch.ones(3)}, tmp_path / "c")
    with open(tmp_path / "c" / ".metadata", "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, too many"):
        DcpFolder(place_of(tmp_path / "c"))


def test_long_objects_are_refused(tmp_path, monkeypatch):
    quiet_save({"n": "text" * 1000, "x": torch.ones(3)}, tmp_path / "c")
    monkeypatch.setattr(dcp_reading, "LONGEST_OBJECT", 3000)
    with pytest.raises(CheckpointError, match="bytes, more than 3000"):
        DcpFolder(place_of(tmp_path / "c")).object("n")
