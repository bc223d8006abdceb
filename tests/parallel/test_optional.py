"""A missing optional package is named with its extra; a missing function is told apart."""

import math
import sys

import pytest
import torch

from megablocks_core.parallel.optional import imported, is_installed


def test_what_is_installed_is_taken():
    assert imported("math", "sqrt", extra="x") is math.sqrt


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such", None)
    with pytest.raises(ImportError, match=r"f needs no_such: .*megablocks-core\[x\]"):
        imported("no_such.part", "f", extra="x")


def test_a_function_that_is_missing_is_told_apart():
    with pytest.raises(AttributeError):
        imported("math", "no_such_function", extra="x")


def test_a_module_is_there_or_not(monkeypatch):
    assert is_installed("json") and not is_installed("no_such_module")
    monkeypatch.setitem(sys.modules, "no_such_module", math)
    assert is_installed("no_such_module")


def test_what_is_installed_is_a_constant_for_the_compiler():
    def attend(x):
        return x + 1 if is_installed("flash_attn_of_nobody") else x + 2

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 2
