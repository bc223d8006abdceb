"""The run record: all that is needed to say, later, what a run was."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy
import torch
from torch import Tensor

from megablocks_core.train.machine import hardware
from megablocks_core.train.scheduled import Scheduled

_MADE_OTHERWISE = "the run has no record, or one that run_record did not make"
# Parts of a record that a reader asks for, and why one may be missing.
PARTS = {
    "versions": _MADE_OTHERWISE,
    "commit": "the code lies in no git checkout (run_record(directory=...))",
    "hardware": _MADE_OTHERWISE,
    "mesh": "none was given (run_record(mesh=mesh.describe()))",
    "data": "no hash of the data was given (run_record(data=...))",
    "tokenizer": "no hash or name of the tokenizer was given (run_record(tokenizer=...))",
    "spec": "none was given (run_record(spec=...))",
    "optimizer": "none was given (run_record(optimizer=...))",
    "schedule": "none was given (run_record(schedule=...))",
    "command_line": _MADE_OTHERWISE,
}


def run_record(
    *,
    label: str = "",
    mesh: object = None,
    spec: object = None,
    data: object = None,
    tokenizer: object = None,
    optimizer: object = None,
    schedule: object = None,
    command_line: Sequence[str] | None = None,
    directory: str = ".",
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Versions, commit, hardware, and what the caller says of the run: a dict for JSON.

    ``label`` is a few words for plots and tables, such as "tp=2". ``mesh``
    (``mesh.describe()``), ``spec`` (the model's shape), ``data`` and ``tokenizer`` (hashes, or
    whatever tells them apart) are kept as given, as text where JSON has no form for them.
    Of an ``optimizer`` its class and its options are kept, one value each, or one a parameter
    group where they differ; of a ``schedule``, or a ``Scheduled`` with its base values, the
    text. Several go in as a list or by name. Hand the optimizer in before a schedule or a
    checkpoint has set its rates. ``directory`` is where the user's code lies: its git commit is
    recorded if it is a checkout. The report reads ``flops_per_token`` (forward and backward),
    ``peak_flops`` (all devices together, FLOP/s) and ``price_per_hour`` (all machines together).
    """
    return {
        "label": label,
        "versions": _versions(),
        "commit": git_commit(directory),
        "hardware": hardware(),
        "mesh": _plain(mesh),
        "spec": _plain(spec),
        "data": _plain(data),
        "tokenizer": _plain(tokenizer),
        "optimizer": _plain(optimizer),
        "schedule": _plain(schedule),
        "command_line": list(sys.argv if command_line is None else command_line),
        "flops_per_token": flops_per_token,
        "peak_flops": peak_flops,
        "price_per_hour": price_per_hour,
    }


def missing_from(record: Mapping[str, Any]) -> dict[str, str]:
    """Part to reason, for each of ``PARTS`` that a record lacks."""
    return {part: reason for part, reason in PARTS.items() if not record.get(part)}


def git_commit(directory: str = ".") -> str | None:
    """Commit of the checkout at ``directory``, with "+changes" if files differ; else ``None``."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(directory: str, *arguments: str) -> str:
    command = ["git", "-C", directory, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return answer.stdout.strip()


def _versions() -> dict[str, str | None]:
    try:
        package = metadata.version("megablocks-core")
    except metadata.PackageNotFoundError:
        package = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "megablocks_core": package,
        "platform": platform.platform(),
    }


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    names = dict.fromkeys(name for group in groups for name in group if name != "params")
    return {name: _one([group.get(name) for group in groups]) for name in names}


def _one(values: Sequence[Any]) -> Any:
    """The value that all are, else all of them."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _plain(value: object) -> Any:
    """``value`` with everything that JSON cannot say as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, torch.optim.Optimizer):
        return {"class": type(value).__name__, **_plain(_options(value))}
    if isinstance(value, Scheduled):
        schedule = str(value.schedule)
        return _plain({"option": value.option, "base": _one(value.base), "factor": schedule})
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(item) for item in value]
    return str(value)
