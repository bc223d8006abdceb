"""A decoder with the weights of a Hugging Face folder, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from megablocks_core.export import load_hf
from megablocks_core.export.arguments import folder_of
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import read_json
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec

# Numbers of eight bits need scales.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def decoder_from_hf(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """A ``Decoder`` with the weights of a Hugging Face folder, cut over ``mesh``.

    Each rank reads its own slices and holds nothing else. Sends nothing.

    Args:
        path: A folder with ``config.json`` and safetensors.
        mesh: Its axes ``tp``, ``ep`` and ``etp`` cut the model; default one process.
        device: Of the parameters; default torch's default device.
        dtype: Of the parameters; default what ``config.json`` says, else torch's default.

    Raises:
        ValueError: The config asks for what a ``Decoder`` does not have, or the folder is not
            whole or does not fit it, ``device`` is meta, or ``dtype`` is none that a model computes
            in.
    """
    folder = folder_of(path)
    config = read_json(folder / "config.json", dict)
    spec = DecoderSpec.from_hf(folder)
    layout_of(config)  # before a model is built that no memory holds: sizes that cannot be
    if dtype is None:
        dtype = _dtype_of(config)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(str, _DTYPES))}")
    decoder = Decoder(spec, mesh=mesh, device="meta", dtype=dtype)
    load_hf(decoder, folder, device=device)
    return decoder


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} in config.json must be a dtype of torch")
    return dtype
