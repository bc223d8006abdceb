"""Megatron's ``torch_dist`` checkpoints: their weights as the entry "model" of one of ours."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from megablocks_core.ckpt.manifest import CheckpointError
from megablocks_core.ckpt.plans.boxes import lengths
from megablocks_core.ckpt.tools.checkpoint import Held
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.ckpt.tools.megatron_names import NO_WEIGHTS, Sizes, map_names
from megablocks_core.groups.cuts import Box

_MARK, _BACKEND = "metadata.json", "torch_dist"


def is_megatron(folder: DcpFolder) -> bool:
    """Whether a DCP folder has Megatron's mark.

    Raises:
        CheckpointError: The mark is not JSON.
        ValueError: It is of a kind that is not ``torch_dist``.
    """
    data = folder.read_file(_MARK)
    if data is None:
        return False
    try:
        kind = json.loads(data)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has a {_MARK} that names no sharded_backend") from error
    if kind != _BACKEND:
        raise ValueError(f"{folder} has the sharded_backend {kind!r}, which must be {_BACKEND!r}")
    return True


class MegatronCheckpoint:
    """Weights of a GPT model under Hugging Face's names.

    Args:
        folder: It.
        config: Path of the model's ``config.json``, which is put beside the weights.

    Attributes:
        state: What a manifest would say: one module.
        tensors: By "model/name".
        left_out: Number of keys that hold no weights.

    Raises:
        ValueError: A key has no place in a model of this config, or a tensor of it is missing.
    """

    def __init__(self, folder: DcpFolder, config: str | os.PathLike[str]) -> None:
        with open(config, "rb") as file:
            self._config = file.read()
        try:
            said = json.loads(self._config)
        except ValueError as error:
            raise ValueError(f"config={str(config)!r} is not JSON: {error}") from error
        if not isinstance(said, dict):
            raise ValueError(f"config={str(config)!r} must be a JSON object")
        self.folder = folder
        index = folder.index
        keys = [*index.tensors, *index.objects]
        self.left_out = sum(NO_WEIGHTS.fullmatch(key) is not None for key in keys)
        odd = [key for key in index.objects if not NO_WEIGHTS.fullmatch(key)]
        if odd:
            raise ValueError(f"{folder} has objects that are no weights: {', '.join(odd[:5])}")
        weights = {
            key: held.shape for key, held in index.tensors.items() if not NO_WEIGHTS.fullmatch(key)
        }
        self._sources = {
            f"model/{name}": source for name, source in map_names(weights, Sizes.of(said)).items()
        }
        self.state: dict[str, dict[str, Any]] = {"model": {"kind": "module"}}
        self.tensors = {
            name: Held(index.tensors[source.rows[0].key].dtype, source.shape)
            for name, source in self._sources.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; as for ``Checkpoint``."""
        out = torch.empty(lengths(box), dtype=self.tensors[name].dtype)
        place = 0
        for rows in self._sources[name].rows:
            count = rows.stop - rows.start
            first, last = max(box[0].start, place), min(box[0].stop, place + count)
            if first < last:
                fixed = tuple(slice(at, at + 1) for at in rows.index)
                shift = rows.start - place
                part = self.folder.read(
                    rows.key, (*fixed, slice(first + shift, last + shift), *box[1:])
                )
                out[first - box[0].start : last - box[0].start] = part.view(
                    last - first, *out.shape[1:]
                )
            place += count
        return out

    def beside(self) -> dict[str, bytes]:
        """The config."""
        return {"config.json": self._config}
