"""Write the weights of a model, from any layout, as a checkpoint of TensorRT-LLM up to 1.2."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from megablocks_core.export.described import Described, described, target_of
from megablocks_core.export.drafting import FolderDraft, Written
from megablocks_core.export.hf_files import Files, as_json
from megablocks_core.export.lazies import shape_of
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Recipe
from megablocks_core.export.slabs import dtype_of
from megablocks_core.export.trtllm.config import config_of
from megablocks_core.export.trtllm.mapping import Mapping
from megablocks_core.export.trtllm.model import check_fit, model_of
from megablocks_core.export.trtllm.quantisation import (
    assumed_scales,
    check_recipe,
    entry_of,
    scales_of,
)
from megablocks_core.export.trtllm.scales import Piece
from megablocks_core.export.trtllm.tensors import tensors
from megablocks_core.export.writing import write_folder
from megablocks_core.groups import LOCAL, Group, Whole, interrupts_held, together

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the format has in float32, whatever the model's dtype is.
_ALWAYS_WIDE = (".A_log", ".D", ".dt_bias", ".gate.weight")


def save_trtllm(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    moe_tp: int | None = None,
    moe_ep: int = 1,
    group: Group = LOCAL,
    recipe: Recipe | None = None,
    calibration: Calibration | None = None,
    dtype: torch.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write ``model``, from any layout, as a checkpoint that TensorRT-LLM up to 1.2 builds from.

    The folder holds ``config.json`` and a file for each of the ``tp * pp`` ranks that will run it,
    which need not be as many as hold it now. Newer versions read Hugging Face folders instead
    (``save_hf``, ``save_quantized_hf``). The files are written as in ``save_hf``: in turn by the
    ranks of ``group``, in slabs of bounded size, the same bytes from any layout, whole or not at
    all.

    The head is written also where it is tied. Its rows, and those of the embeddings, are made a
    multiple of ``tp``: rows that are added to the head are a mean of its first ones, whose logit
    is never the largest, and ``vocab_size`` in ``config.json`` stays the real one, beyond which a
    runtime cuts logits off.

    Args:
        model: Llama, Mistral without a window, Qwen2, Qwen3, their mixtures (Mixtral, Qwen3-MoE),
            GPT-2, Gemma 1 to 3, or Mamba-2.
        path: The folder: new, or empty.
        tp: How many ranks share each layer.
        pp: How many stages of layers there are.
        moe_tp: Into how many slices an expert is cut; default what ``moe_ep`` leaves of ``tp``.
        moe_ep: To how many ranks the experts are dealt.
        group: All ranks that hold a part of the model.
        recipe: ``Fp8()`` writes E4M3 numbers and their factors. With ``Int8()`` weights stay as
            they are, and TensorRT-LLM makes integers of them when it builds.
        calibration: What data has shown of activations (``calibrate``); for ``Fp8``.
        dtype: float16, bfloat16 or float32; default that of the weights, if they have one.
        like: A folder whose ``config.json`` is taken; default that of the model.
        vocab_size: How many rows of a padded vocabulary are tokens. Default as the config says.

    Raises:
        ValueError: ``path`` is not empty, the family is not served, the config asks for what
            TensorRT-LLM does not compute, heads or features do not divide, tensors are not those
            that the config describes, values are not finite or do not fit ``dtype``, or the
            calibration lacks one. Nothing was written.
        RuntimeError: Another rank failed.
        OSError: The disk is full, or another fault of the file system.
    """
    task = f"save_trtllm({str(path)!r})"
    with interrupts_held(group=group):
        target = target_of(model, path, group=group, task=task)
        with together(task, group=group):
            ranks = Mapping(tp, pp, moe_tp, moe_ep)
            check_asked(calibration, dtype)
        told = None if calibration is None else _told(calibration)
        found = described(
            model,
            group=group,
            task=task,
            agreed={"path": str(target), "ranks": ranks, "recipe": recipe, "calibration": told},
            dtype=dtype,
            like=like,
            vocab_size=vocab_size,
        )
        write_trtllm(
            found,
            target,
            ranks=ranks,
            recipe=recipe,
            calibration=calibration,
            dtype=dtype,
            group=group,
            task=task,
        )


def write_trtllm(
    found: Described,
    target: Path,
    *,
    ranks: Mapping,
    recipe: Recipe | None,
    calibration: Calibration | None,
    dtype: torch.dtype | None,
    group: Group = LOCAL,
    task: str,
) -> None:
    """Write the checkpoint of a model that has been described; every rank calls it.

    Raises:
        ValueError: What ``save_trtllm`` says of the family, the mapping and the recipe.
    """
    with together(task, group=group):
        own = model_of(found.config)
        check_fit(own, ranks)
        check_recipe(recipe, calibration, own)
        chosen = _dtype(found) if dtype is None else dtype
        config_of(own, ranks, chosen, {})
    scales = scales_of(recipe, found, calibration, group=group, task=task)
    with together(task, group=group):
        pieces = [tensors(own, found.made, one, chosen, scales) for one in ranks.places]
        config = config_of(own, ranks, chosen, entry_of(recipe, pieces))
        files = _files(pieces)
    draft = FolderDraft(target, files, found.ours, rank=group.rank, num_ranks=group.size)
    beside = {"config.json": as_json(config)}
    write_folder(draft, found.collection, lambda: beside, group=group, task=task)


def nbytes_of_checkpoint(
    found: Described, *, ranks: Mapping, recipe: Recipe | None, dtype: torch.dtype | None
) -> int:
    """How many bytes of tensors the files will have.

    Raises:
        ValueError: What ``save_trtllm`` says of the family, the mapping and the dtype.
    """
    own = model_of(found.config)
    check_fit(own, ranks)
    chosen = _dtype(found) if dtype is None else dtype
    scales = assumed_scales(recipe, found.wholes)
    pieces = [tensors(own, found.made, one, chosen, scales) for one in ranks.places]
    return sum(one.whole.nbytes for file in _files(pieces).values() for one in file)


def check_asked(calibration: object, dtype: object) -> None:
    """Raise for what is none of these.

    Raises:
        ValueError: By name.
    """
    if dtype is not None and dtype not in DTYPES:
        served = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype={dtype!r} must be one of {served}")
    if not (calibration is None or isinstance(calibration, Calibration)):
        raise ValueError(f"calibration={calibration!r} must be a Calibration")


def _told(given: Calibration) -> list[list[tuple[str, float]]]:
    return [sorted(one.items()) for one in (given.inputs, given.keys, given.values)]


def _dtype(found: Described) -> torch.dtype:
    """The one dtype of the weights.

    Raises:
        ValueError: They have several, or one that the format lacks.
    """
    wholes = [one for one in found.wholes if not one.name.endswith(_ALWAYS_WIDE)]
    dtypes = sorted({one.dtype for one in wholes}, key=str)
    if len(dtypes) != 1 or dtypes[0] not in DTYPES:
        served = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype=None must be one of {served}, for the weights are {dtypes}")
    return dtypes[0]


def _files(ranks: list[list[Piece]]) -> Files:
    """The file of each rank, the widest dtypes first."""
    return {
        f"rank{rank}.safetensors": [
            _written(piece) for piece in sorted(pieces, key=lambda one: -one.dtype.itemsize)
        ]
        for rank, pieces in enumerate(ranks)
    }


def _written(piece: Piece) -> Written:
    whole = Whole(piece.name, shape_of(piece.value), piece.dtype)
    own = dtype_of(piece.value).itemsize
    # A byte of E4M3 is made of a number that may be float32.
    reads = 4 if piece.dtype == torch.float8_e4m3fn else max(1, own // piece.dtype.itemsize)
    return Written(whole, piece.value, reads)
