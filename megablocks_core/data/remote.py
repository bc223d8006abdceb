"""Files behind a URL, read in ranges through a bounded cache of blocks.

Any URL that fsspec knows: ``s3://``, ``gs://``, ``https://``, ``memory://``, ``file://``. fsspec is
imported where the first URL is opened.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megablocks_core.data.checks import whole_number

BLOCK_BYTES = 1 << 20
TRIES = 6  # of one request, after waits of 0.5, 1, 2, 4 and 8 seconds
FIRST_WAIT = 0.5
# What another try cannot mend.
FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ValueError, TypeError)


class RemoteFiles:
    """Opens the files whose URL begins with ``prefix``; they share ``cache_bytes`` of cache.

    Raises:
        ModuleNotFoundError: fsspec, or what it needs for this kind of URL, is not installed.
    """

    def __init__(
        self, prefix: str, *, storage_options: Mapping[str, Any] | None, cache_bytes: int
    ) -> None:
        whole_number("cache_bytes", cache_bytes, BLOCK_BYTES)
        self.prefix = prefix
        self._options = dict(storage_options or {})
        self._cache_bytes = cache_bytes
        self._connect()

    def open(self, url: str) -> "RemoteFile":
        """Open a file, which costs a request for its size."""
        return RemoteFile(self, url)

    def read(self, url: str) -> bytes:
        """Return the bytes of a small file."""
        return _tried(lambda: self._system.cat_file(self._path(url)), url)

    def size(self, url: str) -> int | None:
        """Return the size of a file, if the server tells it."""
        return _tried(lambda: self._system.size(self._path(url)), url)

    def block(self, url: str, number: int, size: int) -> bytes:
        """Return a block of a file of ``size`` bytes, from the cache if it is there."""
        if os.getpid() != self._process:  # connections do not survive a fork
            self._connect()
        with self._lock:
            if (known := self._blocks.get((url, number))) is not None:
                self._blocks.move_to_end((url, number))
                return known
        start = number * BLOCK_BYTES
        block = self.range(url, start, min(start + BLOCK_BYTES, size))
        with self._lock:
            self._blocks[url, number] = block
            while len(self._blocks) * BLOCK_BYTES > self._cache_bytes:
                self._blocks.popitem(last=False)
        return block

    def range(self, url: str, start: int, stop: int) -> bytes:
        """Return a range of bytes, in one request, past the cache."""
        if os.getpid() != self._process:
            self._connect()

        def request() -> bytes:
            data = self._system.cat_file(self._path(url), start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(
                    f"{url}: gave {len(data)} bytes, must give the {stop - start} "
                    f"from byte {start} on"
                )
            return data

        return _tried(request, url)

    def _connect(self) -> None:
        try:
            import fsspec.core
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"{self.prefix} needs fsspec: pip install 'megablocks-core[remote]'"
            ) from None
        options = {**self._options, "skip_instance_cache": True}
        self._system, self._path_prefix = fsspec.core.url_to_fs(self.prefix, **options)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def _path(self, url: str) -> str:
        """Return what the file system calls the file."""
        return self._path_prefix + url.removeprefix(self.prefix)


class RemoteFile:
    """A file behind a URL; its parts are copies of what the cache holds."""

    def __init__(self, files: RemoteFiles, url: str) -> None:
        self.files, self.url = files, url
        if (size := files.size(url)) is None:
            raise ValueError(f"{url}: must tell its size")
        self.size = size

    def read(self, start: int, stop: int) -> bytes:
        """Return some bytes, fewer where the file ends before."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if last - first >= 2:  # long runs would only push out what is read again and again
            return self.files.range(self.url, start, stop)
        whole = b"".join(
            self.files.block(self.url, number, self.size) for number in range(first, last + 1)
        )
        return whole[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def array(self, dtype: DTypeLike, start: int, stop: int) -> "RemoteArray":
        """Return the bytes from ``start`` to ``stop`` as an array that is read where asked."""
        return RemoteArray(self, np.dtype(dtype), start, stop)


class RemoteArray:
    """A row of numbers in a remote file: an element, a slice or chosen elements are copies of it.

    ``numpy.asarray`` reads the whole.
    """

    ndim = 1

    def __init__(self, file: RemoteFile, dtype: np.dtype, start: int, stop: int) -> None:
        if (stop - start) % dtype.itemsize:
            raise ValueError(f"{stop - start} bytes must be whole numbers of {dtype.name}")
        self.dtype, self.nbytes = dtype, stop - start
        self.size = self.nbytes // dtype.itemsize
        self.shape = (self.size,)
        self._file, self._start = file, start

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int | np.integer) -> Any: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.integer]) -> np.ndarray: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            if step != 1:
                return self[np.arange(start, stop, step)]
            return self._read(start, max(start, stop))
        if isinstance(index, np.ndarray) and index.ndim == 1:
            return np.array([self[int(i)] for i in index], self.dtype)
        place = whole_number("index", index)
        if not -self.size <= place < self.size:
            raise IndexError(f"element {place} of {self.size}")
        return self._read(place % self.size, place % self.size + 1)[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> ArrayLike:
        whole = self._read(0, self.size)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _read(self, start: int, stop: int) -> np.ndarray:
        width = self.dtype.itemsize
        data = self._file.read(self._start + start * width, self._start + stop * width)
        return np.frombuffer(data, self.dtype)


def _tried(request: Callable[[], Any], url: str) -> Any:
    """Return what a request gives, after as many tries as it takes within ``TRIES``."""
    for number in range(TRIES):
        try:
            return request()
        except FINAL:
            raise
        except Exception as error:
            if number + 1 == TRIES:
                raise OSError(f"{url}: failed {TRIES} times, last with: {error}") from error
            time.sleep(FIRST_WAIT * 2**number)
