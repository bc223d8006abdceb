"""What ``.metadata`` of a torch DCP checkpoint says, read without trust."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from reprlib import repr as short
from typing import Any, NoReturn

import torch

from megablocks_core.ckpt.manifest import MOST_DIMS, CheckpointError
from megablocks_core.ckpt.plans.boxes import as_array, tile
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.safe_pickle import Record, load_pickle
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups.cuts import Box


class Metadata(Record):
    """The whole."""


class Tensors(Record):
    """``TensorStorageMetadata``: properties, size and chunks of a tensor."""


class Bytes(Record):
    """``BytesStorageMetadata``: an object that is no tensor."""


class Piece(Record):
    """``ChunkStorageMetadata``: offsets and sizes."""


class Properties(Record):
    """``TensorProperties``: a tuple, the dtype first."""


class Index(Record):
    """``MetadataIndex``: whose bytes are meant."""


class Place(Record):
    """``_StorageInfo``: file, offset and length."""


def _size(*sizes: Any) -> tuple[Any, ...]:
    return tuple(*sizes)


def _ignored(*_: Any) -> None:
    """Stands for what is of no use here, whatever it is made from."""


_METADATA = "torch.distributed.checkpoint.metadata"
# Megatron keeps the plans of all ranks too, which say nothing that the chunks do not.
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
NAMES = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): Tensors,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    (_METADATA, "ChunkStorageMetadata"): Piece,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "StorageMeta"): Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Place,
    (_PLANNER, "SavePlan"): Record,
    (_PLANNER, "WriteItem"): Record,
    (_PLANNER, "WriteItemType"): _ignored,
    (_PLANNER, "TensorWriteData"): Record,
    (_PLANNER, "BytesIOWriteData"): Record,
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): Record,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _ignored,
    ("pathlib", "PosixPath"): _ignored,
    ("pathlib", "PurePosixPath"): _ignored,
    ("pathlib", "WindowsPath"): _ignored,
    ("pathlib", "PureWindowsPath"): _ignored,
}


@dataclass(frozen=True)
class Stretch:
    """Bytes [offset, offset + length) of a file."""

    file: str
    offset: int
    length: int


@dataclass
class DcpIndex:
    """All that a DCP checkpoint says of itself.

    Attributes:
        tensors: By key.
        chunks: For each tensor, its boxes, which cover it, and where each lies.
        objects: Where each object that is no tensor lies.
        paths: For each key, the keys of the nested state dict that lead to it.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    chunks: dict[str, list[tuple[Box, Stretch]]] = field(default_factory=dict)
    objects: dict[str, Stretch] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


def parse_metadata(data: bytes, path: str) -> DcpIndex:
    """The index in ``data``, which was read from ``path``.

    Raises:
        CheckpointError: It names what may run code, or says what cannot be.
    """
    reader = _Reader(path)
    body = load_pickle(data, path, NAMES)
    if not isinstance(body, Metadata):
        reader.refuse("it holds no metadata")
    held = reader.mapping(body, "state_dict_metadata")
    places: dict[tuple[str, tuple[int, ...] | None], Stretch] = {}
    for index, place in reader.mapping(body, "storage_data").items():
        key, offset = reader.index(index)
        places[key, offset] = reader.place(key, place)
    found = DcpIndex()
    for key, one in held.items():
        if type(key) is not str:
            reader.refuse(f"a key is {key!r}")
        if isinstance(one, Bytes):
            found.objects[key] = reader.at(places, key, None)
        else:
            found.tensors[key] = reader.tensor(key, one)
            found.chunks[key] = reader.chunks(key, one, found.tensors[key].shape, places)
    paths = getattr(body, "planner_data", None)
    found.paths = reader.paths(paths if isinstance(paths, dict) else {}, held)
    return found


class _Reader:
    """Takes the metadata apart; the first thing that cannot be is named."""

    def __init__(self, path: str) -> None:
        self._path = path

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} says what cannot be: {what[:300]}")

    def mapping(self, body: Record, name: str) -> dict[Any, Any]:
        value = getattr(body, name, None)
        if not isinstance(value, dict):
            self.refuse(f"{name} is {short(value)}")
        return value

    def numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, tuple | list) or not all(
            type(one) is int and 0 <= one < 2**63 for one in value
        ):
            self.refuse(f"{what} is {short(value)}")
        return tuple(value)

    def index(self, index: Any) -> tuple[str, tuple[int, ...] | None]:
        key, offset = getattr(index, "fqn", None), getattr(index, "offset", None)
        if not isinstance(key, str):
            self.refuse(f"a place is of {short(key)}")
        return key, None if offset is None else self.numbers(offset, f"an offset of {key!r}")

    def place(self, key: str, place: Any) -> Stretch:
        file = getattr(place, "relative_path", None)
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            self.refuse(f"{key!r} lies in {short(file)}, which is no name of a file in its folder")
        if getattr(place, "transform_descriptors", None):
            self.refuse(f"{key!r} is compressed or encrypted, which this library does not read")
        ends = (getattr(place, "offset", None), getattr(place, "length", None))
        return Stretch(file, *self.numbers(ends, f"the place of {key!r}"))

    def at(
        self,
        places: dict[tuple[str, tuple[int, ...] | None], Stretch],
        key: str,
        offset: tuple[int, ...] | None,
    ) -> Stretch:
        if (key, offset) not in places:
            self.refuse(f"{key!r} at {offset} lies nowhere")
        return places[key, offset]

    def tensor(self, key: str, one: Any) -> Held:
        if not isinstance(one, Tensors):
            self.refuse(f"{key!r} is {short(one)}")
        state = getattr(getattr(one, "properties", None), "state", None)
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_CODES:
            self.refuse(f"{key!r} has the dtype {short(dtype)}")
        shape = self.numbers(getattr(one, "size", None), f"the shape of {key!r}")
        if len(shape) > MOST_DIMS or prod(filter(None, shape)) >= 2**60:
            self.refuse(f"{key!r} has the shape {short(shape)}")
        return Held(dtype, shape)

    def chunks(
        self,
        key: str,
        one: Tensors,
        shape: tuple[int, ...],
        places: dict[tuple[str, tuple[int, ...] | None], Stretch],
    ) -> list[tuple[Box, Stretch]]:
        chunks = getattr(one, "chunks", None)
        if not isinstance(chunks, list):
            self.refuse(f"the chunks of {key!r} are {short(chunks)}")
        found: list[tuple[Box, Stretch]] = []
        for chunk in chunks:
            start = self.numbers(getattr(chunk, "offsets", None), f"an offset of {key!r}")
            sizes = self.numbers(getattr(chunk, "sizes", None), f"a size of {key!r}")
            if not len(start) == len(sizes) == len(shape):
                self.refuse(f"a chunk of {key!r} of shape {shape} is {start} of {sizes}")
            if prod(sizes):
                ends = zip(start, sizes, strict=True)
                box = tuple(slice(first, first + length) for first, length in ends)
                found.append((box, self.at(places, key, start)))
        boxes = [box for box, _ in found]
        inner = all(
            part.stop <= length for box in boxes for part, length in zip(box, shape, strict=True)
        )
        if not inner or (prod(shape) and not self._tile(key, boxes, shape)):
            self.refuse(f"the chunks of {key!r} do not hold each element of {shape} once")
        return found

    def _tile(self, key: str, boxes: list[Box], shape: tuple[int, ...]) -> bool:
        try:
            return tile(as_array(boxes, len(shape)), shape)
        except ValueError as error:
            self.refuse(f"the chunks of {key!r}: {error}")

    def paths(self, paths: dict[Any, Any], held: dict[Any, Any]) -> dict[str, Any]:
        found = {}
        for key in held:
            path = paths.get(key, (key,))
            if not isinstance(path, tuple) or not path or not isinstance(path[0], str):
                self.refuse(f"the path of {key!r} is {short(path)}")
            if not all(type(part) in (str, int) for part in path):
                self.refuse(f"the path of {key!r} is {short(path)}")
            found[key] = path
        return found
