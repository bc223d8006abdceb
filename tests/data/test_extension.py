"""Without the extension the twins serve; one that is there and broken is an error."""

import json
import subprocess
import sys

import pytest

from megablocks_core import _native
from megablocks_core.data.extension import native

WITHOUT = """
import importlib.abc, json, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "megablocks_core._native":
            raise {error}

sys.meta_path.insert(0, Finder())
from megablocks_core.data.extension import native
print(json.dumps(native is None))
"""


def test_the_extension_is_used_where_it_is():
    assert native is _native


@pytest.mark.parametrize(
    ("error", "serves"),
    [("ModuleNotFoundError(name)", True), ("ImportError('undefined symbol')", False)],
)
def test_only_a_missing_extension_is_done_without(error, serves):
    code = WITHOUT.format(error=error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if serves:
        assert json.loads(done.stdout)
    else:
        assert "undefined symbol" in done.stderr
