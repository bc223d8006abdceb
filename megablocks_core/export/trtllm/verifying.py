"""Check a TensorRT-LLM checkpoint against the tensors that its ``config.json`` describes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, Shape, View, shape_of
from megablocks_core.export.slabs import dtype_of, nbytes_of, slabs
from megablocks_core.export.trtllm.config import in_hf_words
from megablocks_core.export.trtllm.mapping import Mapping as Ranks
from megablocks_core.export.trtllm.model import check_fit, model_of
from megablocks_core.export.trtllm.quantisation import cached_of
from megablocks_core.export.trtllm.saving import DTYPES
from megablocks_core.export.trtllm.scales import Scales
from megablocks_core.export.trtllm.tensors import padded_vocab, tensors
from megablocks_core.export.verifying import layout_of
from megablocks_core.files import read_json
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.files.slices import open_tensors

_MISTYPED = (KeyError, TypeError, AttributeError, ArithmeticError)
_FILE = "rank{}.safetensors"
_ALGORITHMS = (None, "FP8", "W8A16")
_MOST_RANKS = 100_000


def is_trtllm(folder: Path) -> bool:
    """Whether a folder's ``config.json`` is that of a TensorRT-LLM checkpoint.

    Raises:
        ValueError: There is none, or it is no JSON.
    """
    config = read_json(folder / "config.json", dict)
    return "architecture" in config and "mapping" in config


def verify_trtllm(
    folder: Path,
    *,
    values: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Check that a file is there for each rank and holds what ``config.json`` describes.

    Args:
        folder: The checkpoint.
        values: Look at values too, which must be finite, and factors above 0; else headers alone.
        progress: Called with the bytes of values looked at so far, and in all.

    Raises:
        ValueError: What is wrong, by name.
    """
    config = read_json(folder / "config.json", dict)
    there = {path.name for path in folder.glob("rank*.safetensors")}
    try:
        expected = _expected(config, there)
    except _MISTYPED as error:
        name, text = type(error).__name__, str(error)
        raise ValueError(f"{folder}/config.json lacks what is described: {name}: {text}") from error
    faults = [f"{name} is missing" for name in expected if name not in there]
    faults += [f"{name} is of no rank" for name in sorted(there - expected.keys())]
    opened: dict[str, Mapping[str, Lazy]] = {}
    for name, pieces in expected.items():
        if name in there:
            try:
                opened[name] = open_tensors(folder / name)
            except ValueError as error:
                faults.append(f"{name} is damaged or cut short: {error}")
                continue
            faults += [f"{name}: {fault}" for fault in _differing(opened[name], pieces)]
    if faults:
        raise ValueError(f"{folder} must hold what its config.json describes: {'; '.join(faults)}")
    if values and (faults := _strange(opened, progress)):
        raise ValueError(
            f"{folder}: values must be finite, and factors above 0: {'; '.join(faults)}"
        )


def _expected(
    config: Mapping[str, Any], there: Collection[str]
) -> dict[str, dict[str, tuple[Shape, torch.dtype]]]:
    """By file the shape and dtype of each tensor; of files that are not there, nothing."""
    given = config["mapping"]
    if not isinstance(given, Mapping):
        raise ValueError(f"mapping={given!r} must be an object of sizes")
    ranks = Ranks(
        given.get("tp_size", 1),
        given.get("pp_size", 1),
        given.get("moe_tp_size"),
        given.get("moe_ep_size", 1),
    )
    if ranks.size > _MOST_RANKS or given.get("world_size", ranks.size) != ranks.size:
        raise ValueError(f"mapping={given} must be of tp_size * pp_size ranks")
    dtype = getattr(torch, str(config["dtype"]), None)
    if dtype not in DTYPES:
        served = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype={config['dtype']!r} must be one of {served}")
    words = in_hf_words(config)
    schema = layout_of(words).schema
    model = model_of(words)
    check_fit(model, ranks)
    rows = padded_vocab(model, ranks.tp)
    if config.get("vocab_size_padded", rows) != rows:
        raise ValueError(f"vocab_size_padded={config['vocab_size_padded']} must be {rows}")
    scales = _scales(config.get("quantization") or {}, schema)
    weights = {name: _outline(shape, dtype) for name, shape in schema.items()}
    found: dict[str, dict[str, tuple[Shape, torch.dtype]]] = {}
    for place in ranks.places:
        name = _FILE.format(place.rank)
        pieces = tensors(model, weights, place, dtype, scales) if name in there else []
        found[name] = {one.name: (shape_of(one.value), one.dtype) for one in pieces}
    return found


def _scales(quantization: Mapping[str, Any], schema: Mapping[str, Shape]) -> Scales:
    """Which weights are quantised; numbers do not matter."""
    algorithm = quantization.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        served = ", ".join(map(str, _ALGORITHMS))
        raise ValueError(f"quant_algo={algorithm!r} must be one of {served}")
    if algorithm != "FP8":
        return Scales()
    ones: Mapping[str, float] = defaultdict(lambda: 1.0)
    keys, values = [], []
    if quantization.get("kv_cache_quant_algo") == "FP8":
        keys, values = cached_of(schema)
    return Scales(
        weights=ones,
        inputs=ones,
        keys=dict.fromkeys(keys, 1.0),
        values=dict.fromkeys(values, 1.0),
        excluded=frozenset(quantization.get("exclude_modules") or ()),
    )


def _outline(shape: Shape, dtype: torch.dtype) -> Lazy:
    def read(_: Box) -> Tensor:
        raise AssertionError("an outline has no values")

    return View(shape, DTYPE_CODES[dtype], read)


def _differing(
    found: Mapping[str, Lazy], expected: Mapping[str, tuple[Shape, torch.dtype]]
) -> list[str]:
    faults = []
    if missing := [name for name in expected if name not in found]:
        faults.append(f"missing {missing}")
    if unknown := [name for name in found if name not in expected]:
        faults.append(f"not described {unknown}")
    for name, tensor in found.items():
        shape, dtype = expected.get(name, (None, None))
        own = shape_of(tensor)
        if shape is not None and own != shape:
            faults.append(f"{name} has shape {own}, described as {shape}")
        if dtype is not None and dtype_of(tensor) != dtype:
            faults.append(f"{name} is {dtype_of(tensor)}, described as {dtype}")
    return faults


def _strange(
    files: Mapping[str, Mapping[str, Lazy]], progress: Callable[[int, int], None] | None
) -> list[str]:
    """What holds values that cannot be; a slab at a time."""
    total = sum(nbytes_of(tensor) for found in files.values() for tensor in found.values())
    faults, done = [], 0
    for file, found in files.items():
        for name, tensor in found.items():
            wrong = 0
            for box in slabs(shape_of(tensor), dtype_of(tensor)):
                part = tensor[box]
                done += part.nbytes
                kept = part.float().isfinite()
                if name.endswith("scaling_factor"):
                    kept &= part > 0
                wrong += part.numel() - int(kept.sum())
                if progress is not None:
                    progress(done, total)
            if wrong:
                count = prod(tensor.get_shape())
                faults.append(f"{file}: {name} has {wrong} of {count} that are not")
    return faults
