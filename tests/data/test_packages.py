"""A missing package is named with what needs it and the extra that installs it."""

import math
import sys

import pytest

from megablocks_core.data.packages import package


def test_what_is_installed_is_taken():
    assert package("math", what="a sum") is math


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such", None)
    told = r"a file needs no_such: pip install 'megablocks-core\[other\]'"
    with pytest.raises(ModuleNotFoundError, match=told):
        package("no_such.part", what="a file", extra="other")
