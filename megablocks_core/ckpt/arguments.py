"""What callers hand over, refused by name where it is not of the kind that is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


def check_path(path: Any, name: str = "path") -> str:
    """The text of a path or URL.

    Raises:
        ValueError: It is neither a ``str`` nor an ``os.PathLike`` of one, is empty, or holds what
            no name of a file can.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise ValueError(f"{name}={short(path)} must be a str or an os.PathLike of one")
    if not text:
        raise ValueError(f"{name}='' must not be empty")
    if "\0" in text or not _is_encodable(text):
        raise ValueError(f"{name}={text!r} must hold no NUL and no lone surrogate")
    return text


def check_name(name: str, path: str) -> str:
    """The name of a checkpoint's folder, as ``LATEST`` can say it.

    Raises:
        ValueError: It is hidden, as the folders of unfinished saves are; then nobody would find
            it. Or a line of text cannot hold it.
    """
    said = f"path={path!r} must end in the name of a folder"
    if not name or name.startswith("."):
        raise ValueError(f"{said} that does not begin with '.', not in {name!r}")
    if set(name) & set("/\\\0\n") or not _is_encodable(name, "utf-8"):
        raise ValueError(f"{said} without a backslash, a new line or bytes that are not UTF-8")
    return name


def check_count(count: Any, name: str) -> None:
    """Refuse what is no whole number from 1 on.

    Raises:
        ValueError: It is no ``int`` (``True`` is none), or below 1.
    """
    if type(count) is not int:
        raise ValueError(f"{name}={short(count)} must be an int")
    if count < 1:
        raise ValueError(f"{name}={count} must be at least 1")


def check_state(state: Any, *, to_fill: bool = False) -> None:
    """Refuse what is no ``state``.

    Args:
        state: It.
        to_fill: Whether values will be set in it.

    Raises:
        ValueError: It is no mapping of names, cannot be changed though it must, or holds a module
            with parameters that are not initialised yet.
    """
    kind = MutableMapping if to_fill else Mapping
    if not isinstance(state, kind):
        raise ValueError(f"state={short(state)} must be a {kind.__name__}, such as a dict")
    for entry, value in state.items():
        if not isinstance(entry, str):
            raise ValueError(f"state has the key {short(entry)}; keys must be strings")
        if isinstance(value, nn.Module):
            for tensors in (value.named_parameters(), value.named_buffers()):
                for name, tensor in tensors:
                    if is_lazy(tensor):
                        raise ValueError(f"{entry}/{name} must be initialised: its module is lazy")


def short(value: Any) -> str:
    """A value as an error shows it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, or too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:60] + "..."


def _is_encodable(text: str, encoding: str | None = None) -> bool:
    try:
        _ = os.fsencode(text) if encoding is None else text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
