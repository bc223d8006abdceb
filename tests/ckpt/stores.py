"""Stores as unkind as real ones: what was put is listed late, and nothing can be renamed."""

from contextlib import contextmanager

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class LateStore(MemoryFileSystem):
    """``late://``: a listing shows what was there when ``settle`` was last called.

    The call of number ``fails_at`` fails, before or (``arrives``) after it has had its effect.
    """

    protocol = "late"
    store = {}
    pseudo_dirs = [""]
    listed = []
    calls = []
    fails_at, arrives = None, False

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("late://"))

    @classmethod
    def settle(cls):
        cls.listed = list(cls.store)

    @classmethod
    def clear(cls):
        cls.store.clear()
        cls.calls.clear()
        cls.settle()
        cls.fails_at, cls.arrives = None, False

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        found = {}
        for one in self.listed:
            if one.startswith(path + "/"):
                name, *below = one.removeprefix(path + "/").split("/")
                kind = "directory" if below else "file"
                found[name] = {"name": f"{path}/{name}", "size": 0, "type": kind}
        return list(found.values()) if detail else [one["name"] for one in found.values()]

    def _open(self, path, mode="rb", **kwargs):
        if "w" not in mode:
            return super()._open(path, mode, **kwargs)
        with self._noted(f"put {path}"):
            return super()._open(path, mode, **kwargs)

    def rm_file(self, path):
        with self._noted(f"delete {path}"):
            super().rm_file(path)

    def makedirs(self, path, exist_ok=False):
        pass

    def rmdir(self, path):
        raise OSError("this store has no folders")

    def mv(self, *args, **kwargs):
        raise NotImplementedError("this store has no rename")

    rename = move = cp_file = mv

    @contextmanager
    def _noted(self, call):
        self.calls.append(call)
        fails = self.fails_at == len(self.calls)
        if not fails or self.arrives:
            yield
        if fails:
            raise OSError(5, "Input/output error")


fsspec.register_implementation("late", LateStore, clobber=True)
