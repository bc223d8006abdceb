"""Arguments of another kind are named, and every name that can be used passes."""

from pathlib import Path, PurePosixPath
from types import MappingProxyType

import numpy as np
import pytest
from torch import nn

from megablocks_core.ckpt.arguments import check_count, check_name, check_path, check_state, short


@pytest.mark.parametrize("path", ["a", Path("a/b"), PurePosixPath("/"), ".", "s3://a", "\u00e4 b"])
def test_paths_pass_as_text(path):
    assert check_path(path) == str(path)


@pytest.mark.parametrize("path", [None, 3, 1.5, b"x", [], {}, True, "", "\0a", "a\0", "\ud800"])
def test_what_is_no_path_is_named(path):
    with pytest.raises(ValueError, match="^folder=.* must "):
        check_path(path, "folder")


def test_a_path_of_bytes_is_none():
    class Bytes:
        def __fspath__(self):
            return b"x"

    with pytest.raises(ValueError, match="path=.*must be a str"):
        check_path(Bytes())


@pytest.mark.parametrize("name", ["step-1", "a b", "a.b", "_", "\u00e4", "-", "a:b"])
def test_names_of_checkpoints(name):
    assert check_name(name, f"runs/{name}") == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a\nb", "a\\b", "a/b", "\udcff"])
def test_names_that_nobody_would_find_are_refused(name):
    with pytest.raises(ValueError, match="path='runs/.*' must end in the name of a folder"):
        check_name(name, f"runs/{name}")


def test_counts():
    for count in (1, 2**70):
        check_count(count, "keep_last")
    for count in (True, 1.0, 1.5, float("nan"), float("inf"), "3", [1], None, np.int64(3)):
        with pytest.raises(ValueError, match="^keep_last=.* must be an int$"):
            check_count(count, "keep_last")
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"^keep_last={count} must be at least 1$"):
            check_count(count, "keep_last")


def test_states():
    fixed = MappingProxyType({"a": 1})
    check_state(fixed)
    check_state({"a": nn.Linear(2, 2)}, to_fill=True)
    for state in (None, [], 3, "a", {("a", 1)}):
        with pytest.raises(ValueError, match="^state=.* must be a Mapping"):
            check_state(state)
    with pytest.raises(ValueError, match="^state=.* must be a MutableMapping"):
        check_state(fixed, to_fill=True)
    for key in (3, None, b"a", ("a",)):
        with pytest.raises(ValueError, match="^state has the key .*; keys must be strings"):
            check_state({key: 1})


@pytest.mark.parametrize("module", [nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)], ids=repr)
def test_lazy_modules(module):
    with pytest.raises(ValueError, match="^model/0.(weight|running_mean) must be initialised"):
        check_state({"model": nn.Sequential(module)})


def test_no_value_is_too_long_or_too_deep_to_be_shown():
    deep = []
    for _ in range(3000):
        deep = [deep]
    assert short(deep) == "<list>" and short(10**5000) == "<int>"
    assert short("a") == "'a'" and len(short("a" * 1000)) == 63
