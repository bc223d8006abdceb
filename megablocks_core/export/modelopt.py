"""ModelOpt's quantised tensors as the plain tensors that they stand for, computed box by box.

Numbers and scales have the layouts of ModelOpt 0.47's Hugging Face folders: E4M3 with one scale,
E2M1 in groups of 16 with E4M3 scales, integers of 8 bits with a scale for each row, and of 4 bits
in groups with what activations are multiplied by before. What is read is bfloat16, computed in
float32 and rounded once.

Dimensions: O outputs, I inputs, G numbers of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megablocks_core.export.lazies import Box, Lazy, Shape, View, shape_of
from megablocks_core.numbers.formats import E2M1, unpacked, values_of

Tensors = Mapping[str, Lazy]

# What lies beside a weight, with its name or its module's before.
_OF_WEIGHT = ("_scale", "_scale_2")
_OF_MODULE = ("input_scale", "pre_quant_scale", "k_scale", "v_scale")
_GROUP = 16


class _Format(NamedTuple):
    """How a weight [O I] is stored.

    Attributes:
        code: The dtype of its numbers.
        packs: How many numbers a byte holds along each dimension.
        scale_code: The dtype of its scales.
        scales: The shape of its scales, of its own.
        read: Gives the values of a box.
    """

    code: str
    packs: tuple[int, int]
    scale_code: str
    scales: Callable[[Shape, Shape], Shape]
    read: Callable[[Box, Lazy, Lazy, float, int], Tensor]


def modelopt(tensors: Tensors, settings: Mapping[str, Any], faults: list[str]) -> dict[str, Lazy]:
    """Tensors of files, with plain ones in place of quantised weights and all that scales them.

    Args:
        tensors: By on-disk name.
        settings: The config's entry, in either of ModelOpt's shapes.
        faults: What is found is appended.

    Raises:
        ValueError: The algorithm is not served.
    """
    inner = settings.get("quantization", settings)
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if not isinstance(algorithm, str) or algorithm not in _FORMATS:
        served = ", ".join(_FORMATS)
        raise ValueError(f"quantization_config: quant_algo={algorithm!r} must be one of {served}")
    form = _FORMATS[algorithm]
    found = {name: whole for name, whole in tensors.items() if _owner(name) is None}
    for name in sorted(tensors.keys() - found.keys()):
        owner = _owner(name)
        if owner not in tensors:
            faults.append(f"{owner} is missing, but {name} is there")
    for name, whole in found.items():
        if f"{name}_scale" in tensors:
            wrong = _faults(name, tensors, form, algorithm)
            faults += wrong
            if not wrong:
                found[name] = _plain(name, tensors, form)
        elif whole.get_dtype() in (form.code, "F8_E4M3", "U8"):
            faults.append(f"{name}_scale is missing")
    return found


def _owner(name: str) -> str | None:
    """The weight that a scale belongs to."""
    for ending in _OF_WEIGHT:
        if name.endswith(f".weight{ending}"):
            return name.removesuffix(ending)
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if module and last in _OF_MODULE else None


def _faults(name: str, tensors: Tensors, form: _Format, algorithm: str) -> list[str]:
    whole, scales = tensors[name], tensors[f"{name}_scale"]
    faults = []
    if whole.get_dtype() != form.code:
        faults.append(f"{name} is {whole.get_dtype()} and must be {form.code}")
    if scales.get_dtype() != form.scale_code:
        faults.append(f"{name}_scale is {scales.get_dtype()} and must be {form.scale_code}")
    stored, have = shape_of(whole), shape_of(scales)
    if len(stored) != 2:
        return [*faults, f"{name} has shape {stored} and must be a matrix"]
    shape = _shape(stored, form)
    want = form.scales(shape, have)
    if have != want:
        faults.append(f"{name}_scale has shape {have} and must have {want}, for {name} {shape}")
    single = [f"{name}_scale_2"] if algorithm == "NVFP4" else []
    for one in single:
        if one not in tensors:
            faults.append(f"{one} is missing")
        elif shape_of(tensors[one]) not in ((), (1,)):
            faults.append(f"{one} has shape {shape_of(tensors[one])} and must be a number")
    before = f"{name.rpartition('.')[0]}.pre_quant_scale"
    if before in tensors and shape_of(tensors[before]) != shape[1:]:
        faults.append(f"{before} has shape {shape_of(tensors[before])} and must have {shape[1:]}")
    return faults


def _shape(stored: Shape, form: _Format) -> Shape:
    rows, columns = stored
    return rows * form.packs[0], columns * form.packs[1]


def _plain(name: str, tensors: Tensors, form: _Format) -> Lazy:
    numbers, scales = tensors[name], tensors[f"{name}_scale"]
    shape = _shape(shape_of(numbers), form)
    second = tensors.get(f"{name}_scale_2")
    before = tensors.get(f"{name.rpartition('.')[0]}.pre_quant_scale")
    groups = scales.get_shape()[-1] if len(scales.get_shape()) == 2 else 1
    size = max(1, shape[1] // max(1, groups))

    def read(box: Box) -> Tensor:
        factor = 1.0 if second is None else float(second[...].reshape(()))
        values = form.read(box, numbers, scales, factor, size)
        if before is not None:
            values = values * before[box[1]].float()
        return values.bfloat16()

    return View(shape, "BF16", read)


def _fp8(box: Box, numbers: Lazy, scales: Lazy, factor: float, size: int) -> Tensor:
    return numbers[box].float() * scales[...].reshape(())


def _int8(box: Box, numbers: Lazy, scales: Lazy, factor: float, size: int) -> Tensor:
    return numbers[box].float() * scales[box[0]].unsqueeze(1)


def _nvfp4(box: Box, numbers: Lazy, scales: Lazy, factor: float, size: int) -> Tensor:
    rows, columns = box
    taken = slice(columns.start // 2, -(-columns.stop // 2))
    codes = unpacked(numbers[rows, taken])
    first = columns.start - 2 * taken.start
    values = values_of(codes[:, first : first + columns.stop - columns.start], E2M1)
    return values * _of_groups(box, scales, size, factor)


def _int4(box: Box, numbers: Lazy, scales: Lazy, factor: float, size: int) -> Tensor:
    rows, columns = box
    taken = slice(rows.start // 2, -(-rows.stop // 2))
    codes = unpacked(numbers[taken, columns].T).T.to(torch.int8)
    first = rows.start - 2 * taken.start
    # The upper half of 16 codes stands for -8 to -1.
    values = (codes[first : first + rows.stop - rows.start] ^ 8) - 8
    return values.float() * _of_groups(box, scales, size, factor)


def _of_groups(box: Box, scales: Lazy, size: int, factor: float) -> Tensor:
    """The scale of its group at each place of a box."""
    rows, columns = box
    taken = slice(columns.start // size, -(-columns.stop // size))
    places = torch.arange(columns.start, columns.stop) // size - taken.start
    return (scales[rows, taken].float() * factor).index_select(1, places)


def _rows(shape: Shape, _: Shape) -> Shape:
    return shape[:1]


def _single(_: Shape, have: Shape) -> Shape:
    return have if have == (1,) else ()


def _sixteens(shape: Shape, _: Shape) -> Shape:
    return shape[0], shape[1] // _GROUP


def _groups(shape: Shape, have: Shape) -> Shape:
    """Of any size that divides a row."""
    count = have[1] if len(have) == 2 else 0
    return (shape[0], count if count and shape[1] % count == 0 else max(1, shape[1] // 128))


_FORMATS = {
    "FP8": _Format("F8_E4M3", (1, 1), "F32", _single, _fp8),
    "NVFP4": _Format("U8", (1, 2), "F8_E4M3", _sixteens, _nvfp4),
    "W8A16": _Format("I8", (1, 1), "F32", _rows, _int8),
    "W4A16_AWQ": _Format("U8", (2, 1), "F32", _groups, _int4),
}
