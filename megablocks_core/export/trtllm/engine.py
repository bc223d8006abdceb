"""Engines, built by an installed TensorRT-LLM up to 1.2 from a checkpoint."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from megablocks_core.export.arguments import folder_of
from megablocks_core.export.trtllm.verifying import is_trtllm, verify_trtllm
from megablocks_core.files import check_new, read_json

_NEWEST = (1, 2)


def build_and_save_engine(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_batch_size: int = 8,
    max_input_len: int = 1024,
    max_seq_len: int = 2048,
    max_num_tokens: int | None = None,
    max_beam_width: int = 1,
) -> None:
    """Build the engine of each rank of a checkpoint, one behind the other, and save them.

    It needs a GPU and the package ``tensorrt_llm``, which is imported here and nowhere else:
    versions from 1.3 on have no engines and read Hugging Face folders instead.

    Args:
        checkpoint: What ``save_trtllm`` wrote; it is verified first.
        out: The folder of engines: new, or empty.
        max_batch_size: Requests that run at once.
        max_input_len: Tokens of a prompt.
        max_seq_len: Tokens of a prompt and what follows it.
        max_num_tokens: Tokens of a batch; default what TensorRT-LLM chooses.
        max_beam_width: Beams of a search.

    Raises:
        ValueError: The checkpoint is not whole, ``out`` is not empty, or a limit is no number.
        ImportError: There is no ``tensorrt_llm``, or one that has no engines.
    """
    limits = {
        "max_batch_size": max_batch_size,
        "max_input_len": max_input_len,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        "max_beam_width": max_beam_width,
    }
    for name, value in limits.items():
        if not (type(value) is int and value > 0 or name == "max_num_tokens" and value is None):
            raise ValueError(f"{name}={value!r} must be a whole number above 0")
    if max_input_len > max_seq_len:
        raise ValueError(f"max_input_len={max_input_len} must be at most {max_seq_len=}")
    folder, target = folder_of(checkpoint, "checkpoint"), folder_of(out, "out")
    if not is_trtllm(folder):
        raise ValueError(f"checkpoint={str(folder)!r} must be one of TensorRT-LLM")
    verify_trtllm(folder)
    check_new(target)
    library = _library()
    _build(library, folder, target, {k: v for k, v in limits.items() if v is not None})


def _library() -> Any:
    """The package, of a version that has engines.

    Raises:
        ImportError: There is none.
    """
    try:
        library = import_module("tensorrt_llm")
    except ImportError as error:
        raise ImportError(
            "build_and_save_engine needs tensorrt_llm up to 1.2 (docker/trtllm.Dockerfile has it); "
            "newer versions, vLLM and SGLang read what save_hf and save_quantized_hf write"
        ) from error
    version = str(library.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) > _NEWEST:
        raise ImportError(
            f"tensorrt_llm {version} has no engines: they were removed after 1.2; "
            "it reads what save_hf and save_quantized_hf write"
        )
    return library


def _build(library: Any, checkpoint: Path, out: Path, limits: dict[str, int]) -> None:
    models = import_module("tensorrt_llm.models")
    config = read_json(checkpoint / "config.json", dict)
    kind = models.MODEL_MAP[config["architecture"]]
    for rank in range(config["mapping"]["world_size"]):
        model = kind.from_checkpoint(str(checkpoint), rank=rank)
        library.build(model, library.BuildConfig(**limits)).save(str(out))
