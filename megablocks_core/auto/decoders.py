"""A decoder with the weights of a Hugging Face folder, in one call."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megablocks_core.export import load_hf
from megablocks_core.files import read_json
from megablocks_core.groups import Mesh
from megablocks_core.layers import Decoder, DecoderSpec


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
            whole or does not fit it, or ``device`` is meta.
    """
    if dtype is None:
        dtype = _dtype_of(path)
    decoder = Decoder(DecoderSpec.from_hf(path), mesh=mesh, device="meta", dtype=dtype)
    load_hf(decoder, path, device=device)
    return decoder


def _dtype_of(path: str | os.PathLike[str]) -> torch.dtype | None:
    config = read_json(Path(path) / "config.json", dict)
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} in config.json must be a dtype of torch")
    return dtype
