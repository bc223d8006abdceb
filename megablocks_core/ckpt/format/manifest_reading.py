"""Read a manifest and believe nothing in it that has not been checked.

A manifest's hash tells damage, not malice: whoever can write the files can write the hash. So
names, types, sizes and boxes are all checked before anything is made of them.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import xxhash

from megablocks_core.ckpt.arguments import short
from megablocks_core.ckpt.format.file_names import FILE_NAME
from megablocks_core.ckpt.manifest import (
    BLOCK_BYTES,
    DTYPES,
    FORMAT,
    HASH_KEY,
    LAST_TIME,
    MANIFEST,
    MOST_DIMS,
    VERSION,
    CheckpointError,
    Chunk,
    FileRecord,
    Manifest,
    StoredAs,
)
from megablocks_core.ckpt.places.places import Place
from megablocks_core.ckpt.plans.boxes import any_meet, as_array, tile
from megablocks_core.groups.cuts import Box

_KINDS = ("module", "optimizer", "tensor", "json")
# A longer manifest would be of more than ten million tensors.
_LONGEST = 2**31
# Boxes that are compared in pairs; more are looked at all at once.
_FEW = 64


def read_manifest(place: Place, *, tensors: bool = True) -> Manifest:
    """Read and check a checkpoint's manifest.

    Args:
        place: The checkpoint's folder.
        tensors: Without them only the rest is looked at, which takes a third of the time.

    Raises:
        CheckpointError: There is none, its hash differs, it is of another format, or it says
            what cannot be.
    """
    size = place.size(MANIFEST)
    if size is not None and size > _LONGEST:
        raise CheckpointError(f"{place.child(MANIFEST)} has {size} bytes, more than {_LONGEST}")
    data = place.read(MANIFEST)
    if data is None:
        raise CheckpointError(f"{place} has no {MANIFEST}: it is not a finished checkpoint")
    return parse_manifest(data, f"{place.child(MANIFEST)}", tensors=tensors)


def parse_manifest(data: bytes, path: str, *, tensors: bool = True) -> Manifest:
    """The manifest in ``data``, which was read from ``path``.

    Raises:
        CheckpointError: As ``read_manifest``.
    """
    text = data.decode(errors="replace")
    head, _, tail = text.rpartition(HASH_KEY)
    digest = xxhash.xxh3_128_hexdigest(head.encode())
    if tail != f'{digest}"\n}}\n':
        raise CheckpointError(f"{path} is damaged: its hash is not the one it ends with")
    try:
        body = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    reader = _Reader(path)
    if (body.get("format"), body.get("version")) not in ((FORMAT, 1), (FORMAT, VERSION)):
        raise CheckpointError(
            f"{path} has format {body.get('format')!r} version {body.get('version')!r}; "
            f"this library reads {FORMAT!r} versions 1 and {VERSION}"
        )
    files = {name: reader.file(name, one) for name, one in reader.items(body, "files")}
    manifest = Manifest(
        reader.whole_number(body.get("saved_unix_ns"), "saved_unix_ns"),
        {name: reader.entry(name, one) for name, one in reader.items(body, "state")},
        {},
        files,
        digest,
    )
    if tensors:
        for name, one in reader.items(body, "tensors"):
            manifest.tensors[name] = reader.tensor(name, one, files)
        reader.check_entries(manifest)
        reader.check_apart(manifest)
    return manifest


class _Reader:
    """Takes a manifest's values apart; the first that cannot be is named."""

    def __init__(self, path: str) -> None:
        self._path = path

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} says what cannot be: {what}")

    def items(self, body: Any, key: str) -> list[tuple[str, Any]]:
        value = body.get(key)
        if not isinstance(value, dict):
            self.refuse(f"{key} is {short(value)}, not an object")
        return list(value.items())

    def whole_number(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value <= LAST_TIME:
            self.refuse(f"{what} is {short(value)}")
        return value

    def whole_numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.refuse(f"{what} is {short(value)}")
        return tuple(self.whole_number(one, what) for one in value)

    def entry(self, name: str, one: Any) -> dict[str, Any]:
        if not FILE_NAME.fullmatch(name):
            self.refuse(f"{name!r} is no name of an entry")
        if not isinstance(one, dict) or one.get("kind") not in _KINDS:
            self.refuse(f"state[{name!r}] is {short(one)}")
        if one["kind"] in ("json", "optimizer") and "value" not in one:
            self.refuse(f"state[{name!r}] has no value")
        if one["kind"] == "optimizer" and not _is_optimizer(one["value"]):
            self.refuse(f"state[{name!r}] is no optimizer's: {short(one['value'])}")
        return one

    def file(self, name: str, one: Any) -> FileRecord:
        plain = name not in ("", ".", "..", MANIFEST) and not set(name) & set("/\\")
        if not plain or not name.isprintable() or len(name.encode()) > 255:
            self.refuse(f"{name!r} is no name of a file in its folder")
        if not isinstance(one, dict):
            self.refuse(f"files[{name!r}] is {short(one)}")
        size = self.whole_number(one.get("size"), f"the size of {name!r}")
        hashes = one.get("xxh3_128")
        if (
            not isinstance(hashes, list)
            or len(hashes) != -(-size // BLOCK_BYTES)
            or not all(isinstance(one, str) for one in hashes)
        ):
            self.refuse(f"{name!r} of {size} bytes has the hashes {short(hashes)}")
        return FileRecord(size, hashes)

    def tensor(self, name: str, one: Any, files: dict[str, FileRecord]) -> StoredAs:
        if not isinstance(one, dict) or not isinstance(one.get("chunks"), list):
            self.refuse(f"tensors[{name!r}] is {short(one)}")
        code = one.get("dtype")
        if not isinstance(code, str) or code not in DTYPES:
            self.refuse(f"{name!r} has the dtype {short(code)}")
        shape = self.whole_numbers(one.get("shape"), f"the shape of {name!r}")
        if len(shape) > MOST_DIMS or prod(filter(None, shape)) >= 2**60:
            self.refuse(f"{name!r} has the shape {short(shape)}")
        stored = StoredAs(code, shape, [self._chunk(name, part, shape) for part in one["chunks"]])
        for part in stored.chunks:
            if part.file not in files or stored.end_of(part) > files[part.file].size:
                self.refuse(f"a chunk of {name!r} lies outside the files: {part}")
            if part.offset % DTYPES[code].itemsize:
                self.refuse(f"a chunk of {name!r} begins within an element: {part}")
        self._check_cover(name, stored)
        return stored

    def _chunk(self, name: str, part: Any, whole: tuple[int, ...]) -> Chunk:
        if isinstance(part, dict):  # version 1: one chunk, the whole
            part = [part.get("file"), part.get("offset"), [0] * len(whole), list(whole)]
        if not isinstance(part, list) or len(part) != 4 or not isinstance(part[0], str):
            self.refuse(f"a chunk of {name!r} is {short(part)}")
        offset = self.whole_number(part[1], f"the offset of a chunk of {name!r}")
        start = self.whole_numbers(part[2], f"the start of a chunk of {name!r}")
        shape = self.whole_numbers(part[3], f"the shape of a chunk of {name!r}")
        fits = len(start) == len(shape) == len(whole) and all(
            first + length <= most for first, length, most in zip(start, shape, whole, strict=True)
        )
        if not fits:
            self.refuse(f"a chunk of {name!r} from {start} of shape {shape} is not in {whole}")
        return Chunk(part[0], offset, start, shape)

    def _check_cover(self, name: str, stored: StoredAs) -> None:
        """Each element in one chunk: as many elements as the whole has, and no two chunks meet."""
        count = sum(prod(part.shape) for part in stored.chunks)
        if count != prod(stored.shape):
            self.refuse(f"the chunks of {name!r} hold {count} elements of shape {stored.shape}")
        boxes = [part.box for part in stored.chunks if prod(part.shape)]
        if any_meet(boxes) if len(boxes) <= _FEW else not self._tile(name, boxes, stored.shape):
            self.refuse(f"chunks of {name!r} overlap")

    def _tile(self, name: str, boxes: list[Box], shape: tuple[int, ...]) -> bool:
        try:
            return tile(as_array(boxes, len(shape)), shape)
        except ValueError as error:
            self.refuse(f"the chunks of {name!r}: {error}")

    def check_entries(self, manifest: Manifest) -> None:
        """Each tensor is of an entry that can have it, and no entry that is a tensor lacks it."""
        for name in manifest.tensors:
            entry, _, inner = name.partition("/")
            kind = manifest.state.get(entry, {}).get("kind", "none")
            if not inner or kind not in ("module", "optimizer", "tensor"):
                self.refuse(f"{name!r} is a tensor of an entry of the kind {kind!r}")
            if kind == "tensor" and inner != entry:
                self.refuse(f"{name!r} must be {entry}/{entry}, for its entry is a tensor")
        for entry, said in manifest.state.items():
            if said["kind"] == "tensor" and f"{entry}/{entry}" not in manifest.tensors:
                self.refuse(f"{entry}/{entry} is missing, for its entry is a tensor")

    def check_apart(self, manifest: Manifest) -> None:
        """No two chunks share bytes of a file."""
        runs: dict[str, list[tuple[int, int, str]]] = {}
        for name, stored in manifest.tensors.items():
            for part in stored.chunks:
                if prod(part.shape):
                    run = (part.offset, stored.end_of(part), name)
                    runs.setdefault(part.file, []).append(run)
        for file, found in runs.items():
            for (_, end, first), (start, _, second) in pairwise(sorted(found)):
                if start < end:
                    self.refuse(f"{first!r} and {second!r} overlap in {file!r}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key stands twice: readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} stands twice in an object")
    return found


def _is_optimizer(value: Any) -> bool:
    """Whether a value has what a torch optimizer's, or a published one's, is taken apart by."""
    if not isinstance(value, dict) or "values" in value:
        return isinstance(value, dict)
    groups, fields = value.get("param_groups"), value.get("state")
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and all(isinstance(group.get("values"), dict) for group in groups)
        and all(isinstance(group.get("names"), list) for group in groups)
        and all(isinstance(name, str) for group in groups for name in group["names"])
        and isinstance(fields, dict)
        and all(isinstance(numbers, dict) for numbers in fields.values())
    )
