"""The same work in Megatron-LM and Grain, where they are installed.

Run the benchmarks with the Python that ``tools/oracles.sh megatron`` prints: it has both. Where a
peer is missing, ours is compared with its NumPy twin and no limit applies.
"""

from importlib import import_module
from typing import Any

MEGATRON, GRAIN, TWIN = "megatron-core compiled helpers", "grain index_shuffle", "NumPy twin"


def megatron_helpers() -> Any:
    """The compiled helpers of megatron-core, or ``None``."""
    return _module("megatron.core.datasets.helpers_cpp")


def grain_shuffle() -> Any:
    """The compiled index shuffle of Grain, or ``None``."""
    folder = "grain._src.python.experimental.index_shuffle.python"
    module = _module(f"{folder}.index_shuffle_module")
    return module and module.index_shuffle


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None
