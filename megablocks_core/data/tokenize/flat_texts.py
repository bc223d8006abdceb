"""Texts in one block of memory, as JSON lines are read and an engine may take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class FlatTexts(Sequence[str]):
    """A list of texts without a NUL, which become strings when they are asked for.

    Args:
        data: UTF-8, with a NUL after each text.
        ends: Of each text in it, int64.
        start: Where the first begins.
    """

    def __init__(self, data: bytes, ends: np.ndarray, start: int = 0) -> None:
        self._data, self._ends, self._start = data, ends, start

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> FlatTexts: ...
    def __getitem__(self, index: int | slice) -> str | FlatTexts:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"step={step} must be 1")
            return FlatTexts(self._data, self._ends[start:stop], self._begin(start))
        at = range(len(self))[index]
        return self._data[self._begin(at) : self._ends[at]].decode()

    def sizes(self) -> np.ndarray:
        """Bytes of each, int64."""
        return np.diff(self._ends, prepend=self._start - 1) - 1

    def joined(self) -> bytes:
        """All of them, with a NUL between two."""
        return self._data[self._start : self._ends[-1]] if len(self) else b""

    def contents(self) -> list[bytes]:
        """The UTF-8 of each."""
        return self.joined().split(b"\0") if len(self) else []

    def _begin(self, at: int) -> int:
        return int(self._ends[at - 1]) + 1 if at else self._start


class LinePlaces(Sequence[tuple[int, int]]):
    """The file, and of each text the line."""

    def __init__(self, file: int, lines: np.ndarray) -> None:
        self._file, self._lines = file, lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> LinePlaces: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | LinePlaces:
        if isinstance(index, slice):
            return LinePlaces(self._file, self._lines[index])
        return self._file, int(self._lines[index])


def utf8_sizes(texts: Sequence[str]) -> np.ndarray:
    """Bytes of each text in UTF-8, int64."""
    if isinstance(texts, FlatTexts):
        return texts.sizes()
    return np.fromiter(map(_utf8_bytes, texts), np.int64, len(texts))


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
