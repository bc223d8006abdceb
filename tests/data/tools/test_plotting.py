"""Pictures are files of SVG that hold what they should, and are the same each time."""

import re
import sys

import pytest

from megablocks_core.data.tools import open_recipe, plot_lengths, plot_recipe

from .conftest import build, names

pytest.importorskip("matplotlib")


def test_lengths(tmp_path):
    prefixes = [
        build(tmp_path / "a$1$", [[1] * n for n in range(20)]),
        build(tmp_path / "b", [[1]]),
    ]
    plot_lengths(prefixes, tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_bytes()
    words = set(re.findall(r"<!-- (.*?) -->", picture.decode()))
    assert {"a$1$", "b", "documents", "tokens", "share", "16"} <= words
    plot_lengths(prefixes, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == picture


def test_a_recipe(tmp_path, recipe_file):
    recipe = open_recipe(recipe_file())
    plot_recipe(recipe, tmp_path / "a.svg")
    words = re.findall(r"<!-- (.*?) -->", (tmp_path / "a.svg").read_text())
    assert {"web", "code", "share of samples", "epochs", "step"} <= set(words)


def test_what_cannot_be_drawn_leaves_no_file(tmp_path, monkeypatch):
    empty, one = build(tmp_path / "a", []), build(tmp_path / "b", [[1]])
    before = names(tmp_path)
    with pytest.raises(ValueError, match="has no documents"):
        plot_lengths([empty], tmp_path / "x.svg")
    with pytest.raises(ValueError, match="out='x.png' must end in .svg"):
        plot_lengths([one], "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"megablocks-core\[report\]"):
        plot_lengths([one], tmp_path / "x.svg")
    assert names(tmp_path) == before
