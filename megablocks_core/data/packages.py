"""Optional packages, imported when a file or a tokenizer needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def package(module: str, *, what: str, extra: str = "tokenize") -> Any:
    """A module of an optional package.

    Args:
        module: Its full name.
        what: What needs it, for the error.
        extra: That installs it.

    Raises:
        ModuleNotFoundError: It is missing; the extra is named.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {name}: pip install 'megablocks-core[{extra}]'"
        ) from error
