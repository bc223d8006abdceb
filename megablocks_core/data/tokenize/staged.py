"""What is written so far, in ``PREFIX.tokenizing/``: it outlives a kill and a loss of power.

``recipe.json`` says what is made, the other files hold it, in the order of units:

``tokens``    the ids, as the token file will have them
``lengths``   int32, of each document
``hashes``    uint64, the content hash of each
``pieces``    16 bytes, the hash of each piece of the inputs
``bad``       a JSON line for each line, row or file that is no text

``journal`` has a line of JSON for each time that all of it was synced: how long each file was, and
the counts. The last whole line counts; what stands in the files after it is written again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megablocks_core.data.tokenize.encoding import Encoded
from megablocks_core.data.tokenize.reading import Bad
from megablocks_core.data.tokenize.units import Unit
from megablocks_core.files import create_file, disk, read_json, remove, sync_folder

FILES: tuple[str, ...] = ("tokens", "lengths", "hashes", "pieces", "bad")
_BLOCK = 1 << 22


@dataclass
class Counts:
    """How far a run is.

    Attributes:
        units: That are written.
        file: The input that the last of them is of.
        lines: Of that input in them.
        documents: Written.
        tokens: Of them.
        empty: Texts that gave no document.
        text_bytes: Of the documents' texts, in UTF-8.
        inner_ends: Ids inside documents that are the end's.
        nbytes: Of the inputs, compressed as they are.
        bad: How many lines, rows and files are no text, by reason.
    """

    units: int = 0
    file: int = -1
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    text_bytes: int = 0
    inner_ends: int = 0
    nbytes: int = 0
    bad: dict[str, int] = field(default_factory=dict)


class Staged:
    """The folder beside a prefix, open and locked.

    Args:
        prefix: Of the dataset.
        recipe: What is made; a folder that another recipe began is refused.

    Attributes:
        counts: As of the last unit.
        build: The name of the build that was about to be published, or published, if any.
        hash: xxh3-128 of the tokens.

    Raises:
        ValueError: Another recipe began it, or its bytes are not those that were synced.
        RuntimeError: Another process writes to it.
    """

    def __init__(self, prefix: str, recipe: Mapping[str, Any]) -> None:
        self.folder = Path(f"{prefix}.tokenizing")
        self.recipe = json.loads(json.dumps(recipe))
        self.counts, self.build = Counts(), ""
        self.hash = xxhash.xxh3_128()
        self._sizes = dict.fromkeys(FILES, 0)
        self._descriptors: dict[str, int] = {}
        disk.make_folder(self.folder, exist_ok=True)
        try:
            self._lock()
            self._open()
        except BaseException:
            self.close()
            raise

    def append(self, unit: Unit, encoded: Encoded, bad: list[tuple[str, Bad]]) -> None:
        """Write a unit, without a promise that it lasts.

        Args:
            unit: The one.
            encoded: What is written of it.
            bad: Its bad lines by path, counted through the whole file.
        """
        data = _bytes(encoded.ids)
        self._write("tokens", data)
        self.hash.update(data)
        self._write("lengths", _bytes(encoded.lengths.astype("<i4")))
        self._write("hashes", _bytes(encoded.hashes.astype("<u8")))
        self._write("pieces", memoryview(encoded.pieces))
        rows = [
            json.dumps({"file": name, "line": one.line or None, "reason": one.reason}) + "\n"
            for name, one in bad
        ]
        self._write("bad", memoryview("".join(rows).encode()))
        counts = self.counts
        counts.lines = self.lines_before(unit) + encoded.lines
        counts.file = unit.files[-1]
        counts.units += 1
        counts.documents += len(encoded.lengths)
        counts.tokens += len(encoded.ids)
        counts.empty += encoded.empty
        counts.text_bytes += encoded.text_bytes
        counts.inner_ends += encoded.inner_ends
        counts.nbytes += unit.nbytes
        for _, one in bad:
            counts.bad[one.reason] = counts.bad.get(one.reason, 0) + 1

    def lines_before(self, unit: Unit) -> int:
        """How many lines of the file of the next unit are in units that are written."""
        return self.counts.lines if self.counts.file == unit.files[0] else 0

    def commit(self, build: str = "") -> None:
        """Promise that all that was written lasts, and with ``build``, that it is all there is."""
        for name in FILES:
            self._named(name, lambda name=name: disk.sync(self._descriptors[name]))
        self.build = build
        state = {
            "counts": asdict(self.counts),
            "sizes": self._sizes,
            "xxh3_128": self.hash.hexdigest(),
            "build": build,
        }
        line = memoryview(json.dumps(state).encode() + b"\n")
        descriptor, at = self._descriptors["journal"], self._journal_size
        self._named("journal", lambda: disk.write(descriptor, [line], at))
        self._named("journal", lambda: disk.sync(descriptor))
        self._journal_size += len(line)

    def path(self, name: str) -> Path:
        """The path of one of the files."""
        return self.folder / name

    def remove(self) -> None:
        """Take the folder away."""
        remove(self.folder)
        self.close()

    def close(self) -> None:
        """Let another process have it."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptors["journal"] = os.open(self.path("journal"), flags, 0o666)
        try:
            fcntl.flock(self._descriptors["journal"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{self.folder}: another process writes to it") from None

    def _open(self) -> None:
        known = self.path("recipe.json")
        if known.exists():
            self._refuse_other(read_json(known, dict))
        else:
            draft = self.path("recipe.draft")
            draft.unlink(missing_ok=True)
            create_file(draft, json.dumps(self.recipe, indent=1).encode())
            disk.replace(draft, known)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        self._read_journal()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        for name in FILES:
            if name == "bad" and self.build and not self.path(name).exists():
                continue  # published already
            self._descriptors[name] = os.open(self.path(name), flags, 0o666)
            self._truncate(name)
        self._hash_again()

    def _refuse_other(self, known: dict[str, Any]) -> None:
        for key in {**known, **self.recipe}:
            old, new = known.get(key), self.recipe.get(key)
            if old != new:
                if isinstance(old, list) and isinstance(new, list):
                    pairs = zip(old, new, strict=False)
                    old, new = next((pair for pair in pairs if pair[0] != pair[1]), (old, new))
                raise ValueError(
                    f"{self.folder}: was begun with {key}={_short(old)}, not {_short(new)}; give "
                    f"what it was begun with, or remove the folder to begin anew"
                )

    def _read_journal(self) -> None:
        """Take up the last whole line, and leave out what a kill cut short."""
        state, good = None, 0
        with open(self.path("journal"), "rb") as file:
            for line in file:
                try:
                    found = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    break
                if found is None:
                    break
                state, good = found, good + len(line)
        os.ftruncate(self._descriptors["journal"], good)
        self._journal_size = good
        self._expected = self.hash.hexdigest()
        if state is not None:
            self.counts, self._sizes = Counts(**state["counts"]), state["sizes"]
            self._expected, self.build = state["xxh3_128"], state["build"]

    def _truncate(self, name: str) -> None:
        size, found = self._sizes[name], os.fstat(self._descriptors[name]).st_size
        if found < size:
            raise ValueError(
                f"{self.path(name)}: holds {found} bytes, must hold {size}; remove the folder to "
                f"begin anew"
            )
        if found > size:  # else the times of a published file stay as they are
            os.ftruncate(self._descriptors[name], size)

    def _hash_again(self) -> None:
        at, size = 0, self._sizes["tokens"]
        while at < size and (part := os.pread(self._descriptors["tokens"], _BLOCK, at)):
            self.hash.update(part)
            at += len(part)
        if self.hash.hexdigest() != self._expected:
            raise ValueError(
                f"{self.path('tokens')}: is not what was written; remove the folder to begin anew"
            )

    def _write(self, name: str, data: memoryview) -> None:
        descriptor, at = self._descriptors[name], self._sizes[name]
        self._named(name, lambda: disk.write(descriptor, [data], at))
        self._sizes[name] = at + data.nbytes

    def _named(self, name: str, call: Any) -> None:
        """Do what writes; an error names the file, and says that it can go on."""
        try:
            call()
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                why += ": call again when there is room; what was written is kept"
            raise OSError(error.errno, why, str(self.path(name))) from error


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
