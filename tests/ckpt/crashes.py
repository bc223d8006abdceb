"""What a disk may hold after a crash: calls are recorded, and replayed with some of them lost.

The model is harsher than real file systems. A write to a file is safe once the file is synced
after it; a name made, changed or deleted in a folder is safe once that folder is synced after it.
Of what is not safe, any subset may have reached the disk.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megablocks_core.files import disk


@dataclass
class _File:
    """Writes as (number of the call, offset, bytes), and the calls that synced it."""

    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)


@dataclass
class _Folder:
    """Changes of names as (number of the call, names that go, name that comes, its node)."""

    changes: list[tuple[int, list[str], str | None, Any]] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    now: dict[str, Any] = field(default_factory=dict)

    def change(self, call, gone, name=None, node=None):
        self.changes.append((call, gone, name, node))
        for one in gone:
            self.now.pop(one, None)
        if name is not None:
            self.now[name] = node


class Recorder:
    """Stands in for ``files.disk`` (use ``installed``) and remembers every call below ``root``.

    Attributes:
        calls: What was called, in order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self._top = _Folder()
        self._lock = threading.Lock()
        self._real = {name: getattr(disk, name) for name in self._stand_ins()}

    def _stand_ins(self) -> dict[str, Callable[..., Any]]:
        return {
            "create": self._create,
            "write": self._write,
            "sync": self._sync,
            "rename": self._rename,
            "replace": self._replace,
            "make_folder": self._make_folder,
            "remove_file": self._remove_file,
            "remove_folder": self._remove_folder,
        }

    def install(self, monkeypatch) -> None:
        for name, stand_in in self._stand_ins().items():
            monkeypatch.setattr(disk, name, stand_in)

    def replay(self, stop: int, survives: Callable[[int], bool], into: Path) -> None:
        """Make the disk as a crash before call ``stop`` may leave it.

        ``survives`` says of the number of each call that was not safe whether it reached the disk.
        """
        into.mkdir()
        self._replay(self._top, stop, survives, into)

    def _replay(self, node, stop, survives, path):
        safe = max((call for call in node.syncs if call < stop), default=-1)

        def kept(call):
            return call < stop and (call < safe or survives(call))

        if isinstance(node, _File):
            with open(path, "wb") as file:
                for call, offset, data in node.writes:
                    if kept(call):
                        file.seek(offset)
                        file.write(data)
            return
        path.mkdir(exist_ok=True)
        names: dict[str, Any] = {}
        for call, gone, name, child in node.changes:
            if kept(call):
                for one in gone:
                    names.pop(one, None)
                if name is not None:
                    names[name] = child
        for name, child in names.items():
            self._replay(child, stop, survives, path / name)

    def _at(self, path):
        node: Any = self._top
        for part in Path(path).relative_to(self.root).parts:
            node = node.now[part]
        return node

    def _noted(self, call, *args):
        self.calls.append(call)
        return len(self.calls) - 1

    def _create(self, path):
        with self._lock:
            descriptor = self._real["create"](path)
            call = self._noted(f"create {path.name}")
            self._at(path.parent).change(call, [], path.name, _File())
            return descriptor

    def _write(self, descriptor, parts, offset):
        with self._lock:
            self._real["write"](descriptor, parts, offset)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            call = self._noted(f"write {path.name}")
            self._at(path).writes.append((call, offset, b"".join(parts)))

    def _sync(self, descriptor):
        with self._lock:
            self._real["sync"](descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            call = self._noted(f"sync {path.name}")
            self._at(path).syncs.append(call)

    def _rename(self, old, new):
        with self._lock:
            node = self._at(old)
            self._real["rename"](old, new)
            call = self._noted(f"rename {old.name} {new.name}")
            self._at(old.parent).change(call, [old.name], new.name, node)

    def _replace(self, old, new):
        with self._lock:
            node = self._at(old)
            self._real["replace"](old, new)
            call = self._noted(f"replace {old.name} {new.name}")
            self._at(old.parent).change(call, [old.name], new.name, node)

    def _make_folder(self, path, *, exist_ok=False):
        with self._lock:
            self._real["make_folder"](path, exist_ok=exist_ok)
            call = self._noted(f"make_folder {path.name}")
            self._at(path.parent).change(call, [], path.name, _Folder())

    def _remove_file(self, path):
        with self._lock:
            self._real["remove_file"](path)
            self._at(path.parent).change(self._noted(f"remove_file {path.name}"), [path.name])

    def _remove_folder(self, path):
        with self._lock:
            self._real["remove_folder"](path)
            self._at(path.parent).change(self._noted(f"remove_folder {path.name}"), [path.name])
