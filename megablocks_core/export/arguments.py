"""What callers hand over, and the errors that name an argument."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path

import torch
from torch import nn


def folder_of(path: object, name: str = "path") -> Path:
    """The folder that an argument names.

    Raises:
        ValueError: It is neither a ``str`` nor an ``os.PathLike`` of one, is empty, or holds what
            no path can.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(
            f"{name}={reprlib.repr(path)} must be a folder: a str or an os.PathLike of one"
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={text!r} must be what a folder can be called") from error
    return Path(text)


def check_model(model: object) -> None:
    """Raise unless it is a module.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={reprlib.repr(model)} must be a module of torch")


def check_bytes(value: object, name: str) -> None:
    """Raise unless it is a number of bytes.

    Raises:
        ValueError: It is no whole number above 0.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={reprlib.repr(value)} must be a whole number of bytes above 0")


def device_of(device: object) -> torch.device:
    """The device that an argument names; default torch's default device.

    Raises:
        ValueError: torch has none of that name.
    """
    if device is None:
        return torch.get_default_device()
    try:
        return torch.device(device)  # type: ignore[arg-type]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} must be a device of torch: {error}") from error
