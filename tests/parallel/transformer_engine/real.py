"""``transformer_engine`` 2.20.2 itself, imported without a GPU and without its compiled part.

Its compiled module is replaced by one whose enumerations have the members that its own Python
names; what its import asks of CUDA is answered. So classes, signatures and parameters are real,
and nothing computes.
"""

import os
import re
import sys
import warnings
from contextlib import contextmanager
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

SPEC = find_spec("transformer_engine")
needs_oracle = pytest.mark.skipif(SPEC is None, reason="oracle transformer-engine")


# Enumerations that it has in Python too, whose members must be the compiled ones.
_COMPARED = r"= int\((?:tex\.)?([A-Z]\w+)\.([A-Za-z]\w*)\)"


class _Compiled(ModuleType):
    """Has every name: an enumeration of its ``members``, or an empty class."""

    def __init__(self, name):
        super().__init__(name)
        self.members = {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        members = sorted(self.members.get(name, ()))
        if members:
            made = IntEnum(name, {member: value for value, member in enumerate(members)})
        else:
            made = type(name, (), {"__init__": lambda self, *args, **named: None})
        setattr(self, name, made)
        return made


def _compiled():
    module = _Compiled("transformer_engine_torch")
    found = module.members
    assert SPEC is not None and SPEC.origin is not None
    texts = [path.read_text() for path in Path(SPEC.origin).parent.glob("pytorch/**/*.py")]
    for pattern in (r"\b(?:tex\.)?([A-Z]\w+)\.([A-Za-z]\w*)", _COMPARED):
        members = {}
        for name, member in re.findall(pattern, "\n".join(texts)):
            members.setdefault(name, set()).add(member)
        found |= members
    return module


@contextmanager
def imported():
    """``transformer_engine.pytorch``, in this context alone."""
    before = dict(sys.modules)
    properties = mock.Mock(multi_processor_count=132, major=9, minor=0)
    with (
        mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        sys.modules["transformer_engine_torch"] = _compiled()
        sys.modules.setdefault("flash_attn_2_cuda", _Compiled("flash_attn_2_cuda"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of parts that are not compiled.
                common: Any = import_module("transformer_engine.common")
                common.load_framework_extension = lambda framework: None
                package = import_module("transformer_engine.pytorch")
            yield package
        finally:
            for name in set(sys.modules) - set(before):
                if name.startswith(("transformer_engine", "flash_attn")):
                    del sys.modules[name]
