"""The public packages mamba-ssm and causal-conv1d, as ``tools/oracles.sh mamba`` installs them.

Their compiled extensions are not built: empty modules stand for them, so that the references in
plain torch can be imported.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILED = ("selective_scan_cuda", "causal_conv1d_cuda")


def mamba_ssm(name: str) -> Any:
    """The module ``mamba_ssm.NAME``, or ``None`` where the package is not installed."""
    return _module("mamba_ssm", name)


def causal_conv1d(name: str) -> Any:
    """The module ``causal_conv1d.NAME``, or ``None`` where the package is not installed."""
    return _module("causal_conv1d", name)


def _module(package: str, name: str) -> Any:
    if find_spec(package) is None:
        return None
    for compiled in _COMPILED:
        if compiled not in sys.modules:
            sys.modules[compiled] = ModuleType(compiled)
            sys.modules[compiled].__spec__ = ModuleSpec(compiled, None)
    return import_module(f"{package}.{name}")
