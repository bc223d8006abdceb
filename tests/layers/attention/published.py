"""Signatures of functions in the sources of packages whose kernels are not built."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_oracle = pytest.mark.skipif(
    find_spec("flash_attn") is None, reason="oracle transformer-engine"
)


def source_of(package, path):
    """A file of an installed package, which is not run."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / path).read_text()


def signature_in(source, name):
    """Arguments of a function, without annotations, as ``signature_of`` gives them."""
    found = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    arguments = found[-1].args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return signature_of(eval(f"lambda {ast.unparse(arguments)}: None"))


def signature_of(function):
    """Arguments and default values of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]
