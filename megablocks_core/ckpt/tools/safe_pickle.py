"""Read a pickle that may be hostile: only named classes are made, and those are ours.

A pickle runs what it names. Here each name it may use stands for a harmless stand-in of this
library; any other is refused, so nothing of torch or of anyone else is called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megablocks_core.ckpt.manifest import CheckpointError

Names = Mapping[tuple[str, str], Callable[..., Any]]


class Record:
    """Stands for an object with attributes, or with a state that is no dict."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(type(key) is str for key in state):
            self.__dict__.update(state)
        else:
            self.state = state


class _Safe(pickle.Unpickler):
    def __init__(
        self, data: bytes, names: Names, load_storage: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._load_storage = names, load_storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")

    def persistent_load(self, pid: Any) -> Any:
        if self._load_storage is None:
            raise pickle.UnpicklingError("it names a storage")
        return self._load_storage(pid)


def load_pickle(
    data: bytes, what: str, names: Names, *, load_storage: Callable[[Any], Any] | None = None
) -> Any:
    """The object in a pickle.

    Args:
        data: The pickle.
        what: What to call it in an error.
        names: For each (module, name) that it may use, what stands for it. dtypes of torch are
            always allowed.
        load_storage: Makes an object of a persistent id.

    Raises:
        CheckpointError: It names anything else, or is damaged.
    """
    try:
        return _Safe(data, names, load_storage).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{what} is not read: {str(error)[:300]}") from error
