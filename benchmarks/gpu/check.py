"""Everything that wants a GPU, checked and timed, in under four minutes on one GPU.

    python -m benchmarks.gpu.check [--out FILE] [WORD...]

Prints one JSON, or writes it to FILE: what the machine is, and for every check (those whose name
contains a word, if words are given) whether it passed, with its figures or its error. Without
CUDA, checks that need it are skipped by name and the others run on the CPU. The exit status is 1
if a check failed.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention, kernels, low_precision, sequences
from benchmarks.gpu.checks import Absent, Check

CHECKS: list[Check] = [
    *kernels.CHECKS,
    *sequences.CHECKS,
    *attention.CHECKS,
    *low_precision.CHECKS,
]
SECONDS = 220  # A check that has not started by then is skipped.


def main(arguments: Sequence[str]) -> int:
    """Run the checks; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    parser.add_argument("words", nargs="*", help="parts of the names of checks to run")
    given = parser.parse_args(arguments)
    report = run([each for each in CHECKS if _is_chosen(each, given.words)])
    text = json.dumps(report, indent=1)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text + "\n")
    return int(any(each["status"] == "failed" for each in report["checks"]))


def run(checks: Sequence[Check], *, seconds: float = SECONDS) -> dict[str, Any]:
    """What the machine is, and the outcome of each check."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    outcomes = []
    for check in checks:
        late = time.perf_counter() - start > seconds
        outcomes.append({"name": check.name, **_outcome(check, device, late=late)})
    total = round(time.perf_counter() - start, 1)
    return {"machine": _machine(device), "seconds": total, "checks": outcomes}


def _is_chosen(check: Check, words: Sequence[str]) -> bool:
    return not words or any(word in check.name for word in words)


def _outcome(check: Check, device: torch.device, *, late: bool) -> dict[str, Any]:
    if check.needs_cuda and device.type != "cuda":
        return {"status": "skipped", "why": "needs CUDA"}
    if late:
        return {"status": "skipped", "why": "the time was up"}
    start = time.perf_counter()
    try:
        figures = check.run(device)
    except Absent as absent:
        return {"status": "skipped", "why": str(absent)}
    except Exception:  # a failed check is an outcome, and the others run
        return {"status": "failed", "error": traceback.format_exc()}
    seconds = round(time.perf_counter() - start, 2)
    return {"status": "passed", "seconds": seconds, "figures": figures}


def _machine(device: torch.device) -> dict[str, str]:
    named = {"device": str(device), "python": platform.python_version()}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        named |= {"gpu": torch.cuda.get_device_name(device), "architecture": f"sm_{major}{minor}"}
    for package in ("torch", "triton", "transformer-engine", "flash-attn", "torchao"):
        try:
            named[package] = version(package)
        except PackageNotFoundError:
            named[package] = "missing"
    return named


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
