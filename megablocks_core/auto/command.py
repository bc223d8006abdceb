"""Write, check and compare Hugging Face folders.

    megablocks-export hf CHECKPOINT OUT [--config config.json] [--like FOLDER] [--dtype bfloat16]
                         [--max-file-size 5GB] [--entry model] [--allow-nonfinite]
    megablocks-export quantize CHECKPOINT_OR_FOLDER OUT --recipe fp8 [--calibration FILE]
                               [--no-kv-cache] [--group-size 128] [--exclude PATTERN]...
                               [--config config.json] [--like FOLDER] [--dtype bfloat16]
                               [--max-file-size 5GB] [--entry model]
    megablocks-export trtllm CHECKPOINT_OR_FOLDER OUT [--tp 1] [--pp 1] [--moe-tp N] [--moe-ep 1]
                             [--recipe fp8|int8] [--calibration FILE] [--no-kv-cache]
                             [--dtype bfloat16] [--config config.json] [--entry model]
    megablocks-export engine CHECKPOINT OUT [--max-batch-size 8] [--max-input-len 1024]
                             [--max-seq-len 2048] [--max-num-tokens N] [--max-beam-width 1]
    megablocks-export verify PATH... [--values]
    megablocks-export diff A B
    megablocks-export calibrate FOLDER --data PREFIX --out FILE [--recipe fp8] [--sequences 512]
                                [--length 2048] [--device cpu]

Exit status: 0 for success; 1 for a fault that was found; 2 for wrong usage. ``diff``: 0 if both
hold the same, 1 if they differ, 2 for trouble.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megablocks_core.auto.calibrating import calibrate_folder
from megablocks_core.auto.checkpoints import checkpoint_to_hf
from megablocks_core.auto.quantizing import quantize_to_hf
from megablocks_core.auto.trtllm import to_trtllm
from megablocks_core.ckpt import CheckpointError
from megablocks_core.export import build_and_save_engine, verify
from megablocks_core.export.differing import diff
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import RECIPES, Recipe
from megablocks_core.files.commands import run_command, say, tell
from megablocks_core.files.progress import Progress

_NAME = "megablocks-export"
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``megablocks-export``; return its exit status."""
    options = _parser().parse_args(arguments)
    return run_command(
        _NAME,
        lambda: options.run(options),
        faults=(CheckpointError, OSError),
        fault_status=2 if options.run is _diff else 1,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME, description="Write, check and compare Hugging Face folders."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("hf", help="turn a training checkpoint into a Hugging Face folder")
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="ours, torch DCP's or Megatron's")
    one.add_argument("out", metavar="OUT", help="a new or empty folder")
    one.add_argument("--config", help="the model's config.json; default: LIKE's, the checkpoint's")
    one.add_argument("--like", metavar="FOLDER", help="copy config and tokenizer files from there")
    one.add_argument("--dtype", choices=_DTYPES, help="of all weights; default: each its own")
    one.add_argument(
        "--max-file-size", type=_size, default=5 * 2**30, metavar="SIZE", help="such as 5GB"
    )
    one.add_argument("--entry", default="model", help="the weights' name, or their average's")
    one.add_argument("--allow-nonfinite", action="store_true", help="write NaN and infinities too")
    one.set_defaults(run=_hf)

    one = commands.add_parser("quantize", help="write a folder of quantised weights")
    one.add_argument("source", metavar="CHECKPOINT_OR_FOLDER", help="or a Hugging Face folder")
    one.add_argument("out", metavar="OUT", help="a new or empty folder")
    one.add_argument("--recipe", choices=RECIPES, required=True, help="the format")
    one.add_argument("--calibration", metavar="FILE", help="what calibrate wrote: fp8 and nvfp4")
    one.add_argument("--no-kv-cache", action="store_true", help="fp8 and nvfp4: caches stay wide")
    one.add_argument("--group-size", type=int, metavar="N", help="int4: of a row; default 128")
    one.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="of modules that stay"
    )
    one.add_argument("--config", help="a checkpoint's config.json; default: LIKE's, its own")
    one.add_argument("--like", metavar="FOLDER", help="copy tokenizer files from there")
    one.add_argument("--dtype", choices=_DTYPES, help="of all weights, before; default: its own")
    one.add_argument(
        "--max-file-size", type=_size, default=5 * 2**30, metavar="SIZE", help="such as 5GB"
    )
    one.add_argument("--entry", default="model", help="a checkpoint's weights, or their average")
    one.set_defaults(run=_quantize)

    _add_trtllm(commands)

    one = commands.add_parser("verify", help="compare names, shapes and dtypes with config.json")
    one.add_argument("paths", nargs="+", metavar="PATH", help="a folder that was written here")
    one.add_argument("--values", action="store_true", help="read all, which must be finite")
    one.set_defaults(run=_verify)

    one = commands.add_parser("diff", help="compare tensors, configs and the files beside")
    one.add_argument("paths", nargs=2, metavar="PATH", help="a Hugging Face folder")
    one.set_defaults(run=_diff)

    one = commands.add_parser("calibrate", help="run a model over data, and note magnitudes")
    one.add_argument("folder", metavar="FOLDER", help="a Hugging Face folder")
    one.add_argument("--data", required=True, metavar="PREFIX", help="an indexed dataset")
    one.add_argument("--out", required=True, metavar="FILE", help="JSON, for quantize and trtllm")
    one.add_argument("--recipe", choices=RECIPES, default="fp8", help="whose weights are looked at")
    one.add_argument("--sequences", type=int, default=512, help="how many samples; default 512")
    one.add_argument("--length", type=int, metavar="N", help="tokens of each; default up to 2048")
    one.add_argument("--device", help="where the model runs, such as cuda; default cpu")
    one.set_defaults(run=_calibrate)
    return parser


def _add_trtllm(commands: Any) -> None:
    one = commands.add_parser("trtllm", help="make a checkpoint of TensorRT-LLM up to 1.2")
    one.add_argument("source", metavar="CHECKPOINT_OR_FOLDER", help="Hugging Face's, or a run's")
    one.add_argument("out", metavar="OUT", help="a new or empty folder")
    one.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    one.add_argument("--pp", type=int, default=1, help="stages of layers")
    one.add_argument("--moe-tp", type=int, help="slices of an expert; default what is left of tp")
    one.add_argument("--moe-ep", type=int, default=1, help="ranks that experts are dealt to")
    one.add_argument("--recipe", choices=("fp8", "int8"), help="default: plain weights")
    one.add_argument("--calibration", metavar="FILE", help="of calibrate; for fp8")
    one.add_argument("--no-kv-cache", action="store_true", help="leave keys and values as they are")
    one.add_argument("--dtype", choices=_DTYPES[:3], help="of plain weights; default: their own")
    one.add_argument("--config", help="of a checkpoint: the model's config.json")
    one.add_argument("--entry", default="model", help="of a checkpoint: the weights' name")
    one.set_defaults(run=_trtllm, exclude=[], group_size=None)

    one = commands.add_parser("engine", help="build engines with an installed tensorrt_llm")
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="of trtllm")
    one.add_argument("out", metavar="OUT", help="a new or empty folder")
    one.add_argument("--max-batch-size", type=int, default=8, help="requests at once")
    one.add_argument("--max-input-len", type=int, default=1024, help="tokens of a prompt")
    one.add_argument("--max-seq-len", type=int, default=2048, help="tokens with what follows")
    one.add_argument("--max-num-tokens", type=int, help="tokens of a batch")
    one.add_argument("--max-beam-width", type=int, default=1, help="beams of a search")
    one.set_defaults(run=_engine)


def _size(text: str) -> int:
    """Bytes, from a number and perhaps a unit."""
    number, unit = text.strip().upper(), 1
    for name, size in _UNITS.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name), size
            break
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of bytes, such as 5GB")
    return int(number) * unit


def _hf(options: argparse.Namespace) -> int:
    progress = Progress("hf")
    try:
        checkpoint_to_hf(
            options.checkpoint,
            options.out,
            entry=options.entry,
            config=options.config,
            like=options.like,
            dtype=options.dtype and getattr(torch, options.dtype),
            max_file_bytes=options.max_file_size,
            allow_nonfinite=options.allow_nonfinite,
            progress=progress.show,
        )
    finally:
        progress.close()
    print(options.out)
    return 0


def _quantize(options: argparse.Namespace) -> int:
    progress, given = Progress("quantize"), options.calibration
    try:
        quantize_to_hf(
            options.source,
            options.out,
            recipe=_recipe(options),
            calibration=None if given is None else Calibration.load(given),
            entry=options.entry,
            config=options.config,
            like=options.like,
            dtype=options.dtype and getattr(torch, options.dtype),
            max_file_bytes=options.max_file_size,
            progress=progress.show,
        )
    finally:
        progress.close()
    print(options.out)
    return 0


def _trtllm(options: argparse.Namespace) -> int:
    progress, given = Progress("trtllm"), options.calibration
    if options.no_kv_cache and options.recipe is None:
        raise ValueError("--no-kv-cache is for --recipe fp8")
    try:
        to_trtllm(
            options.source,
            options.out,
            tp=options.tp,
            pp=options.pp,
            moe_tp=options.moe_tp,
            moe_ep=options.moe_ep,
            recipe=None if options.recipe is None else _recipe(options),
            calibration=None if given is None else Calibration.load(given),
            entry=options.entry,
            config=options.config,
            dtype=options.dtype and getattr(torch, options.dtype),
            progress=progress.show,
        )
    finally:
        progress.close()
    print(options.out)
    return 0


def _engine(options: argparse.Namespace) -> int:
    try:
        build_and_save_engine(
            options.checkpoint,
            options.out,
            max_batch_size=options.max_batch_size,
            max_input_len=options.max_input_len,
            max_seq_len=options.max_seq_len,
            max_num_tokens=options.max_num_tokens,
            max_beam_width=options.max_beam_width,
        )
    except ImportError as error:
        say(_NAME, str(error))
        return 2
    print(options.out)
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    """The recipe of a name, with what options say of it.

    Raises:
        ValueError: An option is one that the recipe does not have.
    """
    words: dict[str, Any] = {"exclude": tuple(options.exclude)}
    if options.no_kv_cache:
        words["kv_cache"] = False
    if options.group_size is not None:
        words["group_size"] = options.group_size
    try:
        return RECIPES[options.recipe](**words)
    except TypeError as error:
        raise ValueError(f"--recipe {options.recipe} has no {[*words][1:]}") from error


def _verify(options: argparse.Namespace) -> int:
    status = 0
    for path in options.paths:
        progress, fault = Progress("verify"), ""
        try:
            verify(path, values=options.values, progress=progress.show)
        except (ValueError, OSError) as error:
            fault = str(error)
        finally:
            progress.close()
        if fault:
            say(_NAME, fault if path in fault else f"{path}: {fault}")
            status = 1
        else:
            tell(f"{path}: whole")
    return status


def _calibrate(options: argparse.Namespace) -> int:
    progress = Progress("calibrate", unit="samples")
    try:
        found = calibrate_folder(
            options.folder,
            options.data,
            recipe=RECIPES[options.recipe](),
            num_sequences=options.sequences,
            sequence_length=options.length,
            device=options.device,
            progress=progress.show,
        )
    finally:
        progress.close()
    found.save(options.out)
    print(options.out)
    return 0


def _diff(options: argparse.Namespace) -> int:
    status = 0
    for line in diff(*options.paths):
        tell(line)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
