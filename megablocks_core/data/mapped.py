"""Files on this machine, mapped into memory."""

import mmap
import os

import numpy as np
from numpy.typing import DTypeLike


class MappedFile:
    """A file whose parts are read-only views of the page cache; nothing is copied.

    It stays readable, and the same, when another file takes its name.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size:
                mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._bytes = np.frombuffer(mapped, np.uint8)
            else:  # cannot be mapped
                self._bytes = np.frombuffer(b"", np.uint8)

    def read(self, start: int, stop: int) -> memoryview:
        """Return some bytes, fewer where the file ends before."""
        return self._bytes[start:stop].data

    def array(self, dtype: DTypeLike, start: int, stop: int) -> np.ndarray:
        """Return the bytes from ``start`` to ``stop`` as an array."""
        return self._bytes[start:stop].view(dtype)


def read_bytes(path: str) -> bytes:
    """Return the bytes of a small file."""
    with open(path, "rb") as file:
        return file.read()
