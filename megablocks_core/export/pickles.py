"""Tensors of a pickle of weights, where its authors publish nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PICKLE = "pytorch_model.bin"
_CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


class Loaded:
    """A tensor mapped from a file, as the lazy slices of safetensors are.

    Args:
        tensor: In mapped memory: only what is asked for is read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(self._tensor.shape)

    def get_dtype(self) -> str:
        """The dtype, as safetensors writes it."""
        return _CODES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, box: Any) -> Tensor:
        return self._tensor[box].clone()


def read_pickle(path: Path) -> dict[str, Loaded]:
    """Its tensors by name. Nothing but tensors is unpickled, so no code of the file runs.

    Raises:
        ValueError: The file is damaged, or holds other things than named tensors.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} must hold tensors and be whole: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{path} must hold tensors by name alone")
    return {str(name): Loaded(tensor) for name, tensor in found.items()}
