"""What is taken from packages that are installed at will, at the moment it is used."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def imported(module: str, name: str, *, extra: str) -> Any:
    """What ``module`` of an optional package calls ``name``.

    Raises:
        ImportError: The package is missing or cannot be loaded; the extra that has it is named.
    """
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(
            f"{name} needs {package}: pip install 'megablocks-core[{extra}]'"
        ) from error


def is_installed(module: str) -> bool:
    """Whether a top-level module is there to be imported; it is not."""
    return module in sys.modules or find_spec(module) is not None


# As torch.compiler.assume_constant_result says it, which would load the compiler here.
is_installed._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
