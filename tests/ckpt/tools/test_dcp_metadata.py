"""``.metadata`` is read without running it, and nothing in it is believed."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.tools.dcp_metadata import Stretch, parse_metadata
from tests.ckpt.tools.saves import save_dcp, trained
from tests.ckpt.tools.test_safe_pickle import Exploit


def tensor(*chunks, shape=(4, 3), dtype=torch.float32):
    pieces = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), pieces)


HALVES = tensor(((0, 0), (2, 3)), ((2, 0), (2, 3)))
PLACES = {
    MetadataIndex("w", (0, 0)): _StorageInfo("a.distcp", 0, 90),
    MetadataIndex("w", (2, 0)): _StorageInfo("a.distcp", 90, 80),
    MetadataIndex("n"): _StorageInfo("b.distcp", 1, 2),
}
GOOD = Metadata({"w": HALVES, "n": BytesStorageMetadata()}, {"w": ("m", "w")}, PLACES)


def parse(metadata):
    return parse_metadata(pickle.dumps(metadata), "file")


def test_what_torch_wrote(tmp_path):
    save_dcp(tmp_path / "c", *trained())
    data = (tmp_path / "c" / ".metadata").read_bytes()
    found, theirs = parse_metadata(data, "file"), pickle.loads(data)
    assert found.tensors.keys() | found.objects.keys() == theirs.state_dict_metadata.keys()
    assert found.paths == theirs.planner_data
    for key, held in found.tensors.items():
        one = theirs.state_dict_metadata[key]
        assert (held.dtype, held.shape) == (one.properties.dtype, tuple(one.size))
    for index, info in theirs.storage_data.items():
        places = dict(found.objects)
        places |= {key: place for key, chunks in found.chunks.items() for _, place in chunks}
        assert places[index.fqn] == Stretch(info.relative_path, info.offset, info.length)


def test_all_that_is_said():
    found = parse(GOOD)
    assert found.chunks["w"] == [
        ((slice(0, 2), slice(0, 3)), Stretch("a.distcp", 0, 90)),
        ((slice(2, 4), slice(0, 3)), Stretch("a.distcp", 90, 80)),
    ]
    assert found.objects == {"n": Stretch("b.distcp", 1, 2)}
    assert found.paths == {"w": ("m", "w"), "n": ("n",)}


@pytest.mark.parametrize(
    "where", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
)
def test_an_exploit_anywhere_is_refused_by_name(tmp_path, where):
    ran = tmp_path / "ran"
    data = pickle.dumps(replace(GOOD, **{where: {"w": Exploit(f"touch {ran}")}}))
    with pytest.raises(CheckpointError, match="file is not read: it names posix.system"):
        parse_metadata(data, "file")
    assert not ran.exists()
    pickle.loads(data)
    assert os.path.exists(ran), "the exploit must be a real one"


def place(name="a.distcp", offset=0, length=9, key="w", transforms=None):
    return {MetadataIndex(key, (0, 0)): _StorageInfo(name, offset, length, transforms)}


WHOLE = tensor(((0, 0), (4, 3)))
# What a few bytes can hold: 2**60 values, and boxes with 2**30 corners each.
NESTED = ("a", "b")
for _ in range(60):
    NESTED = (NESTED, NESTED)
MANY = tensor(
    *[
        ((0,) * dim + (1,) + (0,) * (29 - dim), (1,) * dim + (1,) + (2,) * (29 - dim))
        for dim in range(30)
    ]
    * 37,
    shape=(2,) * 30,
)
MANY_PLACES = {
    MetadataIndex("w", tuple(chunk.offsets)): _StorageInfo("a", 0, 9) for chunk in MANY.chunks
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dict_metadata": 3}, "state_dict_metadata is 3"),
        ({"state_dict_metadata": {3: HALVES}}, "a key is 3"),
        ({"state_dict_metadata": {"w": 3}}, "'w' is 3"),
        ({"state_dict_metadata": {"x": WHOLE}}, "'x' at .* lies nowhere"),
        ({"state_dict_metadata": {"x": BytesStorageMetadata()}}, "'x' at None lies nowhere"),
        ({"state_dict_metadata": {"w": tensor(dtype=torch.complex64)}}, "dtype torch.complex64"),
        ({"state_dict_metadata": {"w": tensor(shape=(2**62, 8))}}, "has the shape"),
        ({"state_dict_metadata": {"w": tensor(shape=(-1, 8))}}, "the shape of 'w' is"),
        ({"state_dict_metadata": {"w": tensor(((0, 0), (2, 3)))}}, "each element"),
        ({"state_dict_metadata": {"w": tensor(*[((0, 0), (2, 3))] * 2)}}, "each element"),
        ({"state_dict_metadata": {"w": tensor(((2, 0), (4, 3)))}}, "each element"),
        ({"state_dict_metadata": {"w": tensor(((0,), (12,)))}}, "a chunk of 'w'"),
        ({"state_dict_metadata": {"w": tensor(((0, 0), (4, -3)))}}, "a size of 'w'"),
        ({"state_dict_metadata": {"w": tensor(shape=(0, 2**40, 2**40))}}, "has the shape"),
        ({"state_dict_metadata": {"w": tensor(shape=(1,) * 65)}}, "has the shape"),
        (
            {"state_dict_metadata": {"w": MANY}, "storage_data": MANY_PLACES},
            "too many dimensions to be compared",
        ),
        ({"state_dict_metadata": {"w": NESTED}}, r"'w' is .*\.\.\."),
        ({"state_dict_metadata": NESTED}, r"state_dict_metadata is .*\.\.\."),
        ({"planner_data": {"w": NESTED}}, r"the path of 'w' is .*\.\.\."),
        ({"storage_data": place("../a")}, "'../a', which is no name"),
        ({"storage_data": place("")}, "which is no name"),
        ({"storage_data": place(offset=-1)}, "the place of 'w'"),
        ({"storage_data": place(length="9")}, "the place of 'w'"),
        ({"storage_data": place(key=3)}, "a place is of 3"),
        ({"storage_data": place(transforms=["zstd"])}, "compressed or encrypted"),
        ({"storage_data": None}, "storage_data is None"),
        ({"planner_data": {"w": "model"}}, "the path of 'w' is 'model'"),
        ({"planner_data": {"w": ("m", 1.5)}}, "the path of 'w'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=f"file says what cannot be: .*{message}"):
        parse(replace(GOOD, **changes))


def test_other_pickles_are_refused():
    for value in ([1], TensorProperties(), None):
        with pytest.raises(CheckpointError, match="it holds no metadata"):
            parse(value)


def test_chunks_without_elements_lie_nowhere():
    empty = tensor(((0, 0), (4, 3)), ((4, 0), (0, 3)))
    found = parse(Metadata({"w": empty}, None, place()))
    assert len(found.chunks["w"]) == 1
    assert parse(Metadata({"w": tensor(shape=(0, 3))}, None, {})).chunks == {"w": []}
