"""Quantised tensors of files as the plain tensors that they stand for, computed box by box.

Blocks of eight-bit floats with one scale each (DeepSeek-V3, https://arxiv.org/abs/2412.19437,
section 3.3.2) and four-bit floats of which 32 share a power of two (MXFP4 of the OCP
microscaling formats, version 1.0). What is read is bfloat16; products are exact in float32, and
rounded once.

Dimensions: E experts, O outputs, I inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, View, shape_of
from megablocks_core.export.modelopt import modelopt
from megablocks_core.files import read_json

Tensors = Mapping[str, Lazy]

_ENTRY = "quantization_config"
_FILE = "hf_quant_config.json"
_SCALE = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_SCALE_CODES = ("F32", "BF16", "F16")
_GROUP = 32  # numbers of MXFP4 that share a scale, two a byte
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255
# How many bytes are computed at a time: what is in between stays in a CPU's cache.
_PIECE = 1 << 17


def dequantised(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Lazy]:
    """Tensors of files, with plain ones in place of those that a config's quantisation made.

    Args:
        tensors: By on-disk name.
        config: Its entry ``quantization_config`` names the method; without one nothing is done.

    Returns:
        By name: in place of a weight and its scales there is one bfloat16 tensor, under the name
        that it has in a folder that is not quantised.

    Raises:
        ValueError: The method is not served, or weights and scales do not fit each other.
    """
    settings = config.get(_ENTRY)
    if settings is None:
        return dict(tensors)
    if not isinstance(settings, Mapping):
        raise ValueError(f"{_ENTRY}={settings!r} must name a quant_method")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        served = ", ".join(_METHODS)
        raise ValueError(f"{_ENTRY}: quant_method={method!r} must be one of {served}")
    faults: list[str] = []
    found = _METHODS[method](tensors, settings, faults)
    if faults:
        raise ValueError(
            f"quantised tensors ({method}) must have their scales: {'; '.join(faults)}"
        )
    return found


def with_file(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A config that says what ModelOpt's file beside it does, if it does not say so itself.

    Raises:
        ValueError: The file is no JSON object.
    """
    if _ENTRY in config or not (folder / _FILE).is_file():
        return dict(config)
    return {**config, _ENTRY: {**read_json(folder / _FILE, dict), "quant_method": "modelopt"}}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config for tensors that are not quantised: it names no method."""
    return {name: value for name, value in config.items() if name != _ENTRY}


def _fp8(tensors: Tensors, settings: Mapping[str, Any], faults: list[str]) -> dict[str, Lazy]:
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise ValueError(f"{_ENTRY}: weight_block_size={block} must be a block's rows and columns")
    found = {name: whole for name, whole in tensors.items() if not name.endswith(_SCALE)}
    for name in sorted(tensors.keys() - found.keys()):
        if (weight := name.removesuffix(_SCALE)) not in tensors:
            faults.append(f"{weight} is missing, but {name} is there")
    for name, whole in found.items():
        scales = tensors.get(name + _SCALE)
        if whole.get_dtype().startswith("F8") and scales is None:
            faults.append(f"{name}{_SCALE} is missing")
        elif scales is not None:
            faults += _fp8_faults(name, whole, scales, block)
            found[name] = _blocks_of_fp8(whole, scales, block)
    return found


def _fp8_faults(name: str, weight: Lazy, scales: Lazy, block: list[int]) -> list[str]:
    faults = []
    if weight.get_dtype() != "F8_E4M3":
        faults.append(f"{name} is {weight.get_dtype()} and must be F8_E4M3")
    if scales.get_dtype() not in _SCALE_CODES:
        codes = ", ".join(_SCALE_CODES)
        faults.append(f"{name}{_SCALE} is {scales.get_dtype()} and must be one of {codes}")
    shape, have = shape_of(weight), shape_of(scales)
    want = (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=False)))
    if len(shape) < 2 or have != want:
        faults.append(f"{name}{_SCALE} has shape {have} and must have {want}, for {name} {shape}")
    return faults


def _blocks_of_fp8(weight: Lazy, scales: Lazy, block: list[int]) -> Lazy:
    """Eight-bit floats [... O I], each times the scale of its block."""

    def read(box: Box) -> Tensor:
        *outer, rows, columns = box
        quantised = weight[box]
        taken = (_spanned(part, size) for part, size in zip(box[-2:], block, strict=True))
        factors = scales[(*outer, *taken)].float()
        row, column = (
            torch.arange(part.start, part.stop, device=factors.device) // size - part.start // size
            for part, size in zip(box[-2:], block, strict=True)
        )
        floats = _floats().to(factors.device)
        values = torch.empty(quantised.shape, dtype=torch.bfloat16, device=factors.device)
        for piece in _pieces(quantised, dim=-2):
            own = factors.index_select(-2, row[piece]).index_select(-1, column)
            codes = quantised[..., piece, :].view(torch.uint8)
            values[..., piece, :] = own.mul_(_looked_up(floats, codes))
        return values

    return View(shape_of(weight), "BF16", read)


def _mxfp4(tensors: Tensors, _: Mapping[str, Any], faults: list[str]) -> dict[str, Lazy]:
    names = {
        name.removesuffix(part)
        for name in tensors
        for part in (_BLOCKS, _EXPONENTS)
        if name.endswith(part)
    }
    parts = {name + part for name in names for part in (_BLOCKS, _EXPONENTS)}
    found = {name: whole for name, whole in tensors.items() if name not in parts}
    for name in sorted(names):
        missing = [part for part in (name + _BLOCKS, name + _EXPONENTS) if part not in tensors]
        if name in tensors:
            faults.append(f"{name} is there beside {name}{_BLOCKS}")
        elif missing:
            faults.append(f"{missing[0]} is missing")
        else:
            blocks, exponents = tensors[name + _BLOCKS], tensors[name + _EXPONENTS]
            wrong = _mxfp4_faults(name, blocks, exponents)
            faults += wrong
            if not wrong:
                found[name] = _groups_of_fp4(blocks, exponents)
    return found


def _mxfp4_faults(name: str, blocks: Lazy, exponents: Lazy) -> list[str]:
    faults = [
        f"{name}{part} is {whole.get_dtype()} and must be U8"
        for part, whole in ((_BLOCKS, blocks), (_EXPONENTS, exponents))
        if whole.get_dtype() != "U8"
    ]
    shape, have = shape_of(blocks), shape_of(exponents)
    if len(shape) != 4 or shape[-1] != _GROUP // 2:
        faults.append(f"{name}{_BLOCKS} has shape {shape} and must be [E O G {_GROUP // 2}]")
    elif have != shape[:-1]:
        faults.append(f"{name}{_EXPONENTS} has shape {have} and must have {shape[:-1]}")
    return faults


def _groups_of_fp4(blocks: Lazy, exponents: Lazy) -> Lazy:
    """Four-bit floats [E O G 16 bytes], each times its group's power of two, as [E I O]."""
    num_experts, outputs, groups, _ = blocks.get_shape()

    def read(box: Box) -> Tensor:
        experts, inputs, rows = box
        taken = _spanned(inputs, _GROUP)
        packed = blocks[(experts, rows, taken, slice(0, _GROUP // 2))]
        scales = exponents[(experts, rows, taken)]
        first = inputs.start - taken.start * _GROUP
        length = inputs.stop - inputs.start
        pairs, powers = _pairs().to(packed.device), _powers().to(packed.device)
        values = torch.empty(
            (*packed.shape[:2], length), dtype=torch.bfloat16, device=packed.device
        )
        for piece in _pieces(packed, dim=1):
            signed = _looked_up(pairs, packed[:, piece]).flatten(-2)
            signed *= _looked_up(powers, scales[:, piece]).unsqueeze(-1)
            values[:, piece] = signed.flatten(-2).narrow(-1, first, length)
        return values.transpose(1, 2)

    return View((num_experts, groups * _GROUP, outputs), "BF16", read)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Rows of a table of 256, for every byte."""
    found = table.index_select(0, codes.reshape(-1).int())
    return found.view(*codes.shape, *table.shape[1:])


def _floats() -> Tensor:
    """The number of every byte [256], in float32."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    return codes.view(torch.float8_e4m3fn).float()


def _pairs() -> Tensor:
    """The two numbers of every byte [256 2], the one of the lower four bits first."""
    numbers = torch.tensor(_MAGNITUDES, dtype=torch.bfloat16, device="cpu")
    numbers = torch.cat([numbers, -numbers])
    codes = torch.arange(256, device="cpu")
    return torch.stack([numbers[codes & 15], numbers[codes >> 4]], dim=1)


def _powers() -> Tensor:
    """The power of two of every scale [256], exact in bfloat16; the last is no number."""
    exponents = torch.arange(256, device="cpu") - _BIAS
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64, device="cpu"), exponents)
    powers[_NAN] = torch.nan
    return powers.bfloat16()


def _spanned(part: slice, size: int) -> slice:
    """The blocks of ``size`` that hold a part of a dimension."""
    return slice(part.start // size, -(-part.stop // size))


def _pieces(tensor: Tensor, dim: int) -> Iterator[slice]:
    """Parts of a dimension that hold a bounded number of bytes of ``tensor``."""
    length = tensor.shape[dim]
    step = max(1, _PIECE * length // max(1, tensor.numel()))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


_Method = Callable[[Tensors, Mapping[str, Any], list[str]], dict[str, Lazy]]
_METHODS: dict[str, _Method] = {"fp8": _fp8, "mxfp4": _mxfp4, "modelopt": modelopt}
