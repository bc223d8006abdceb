"""What a dataset was made of is recorded for its build, and no input is written over."""

import json
import os

import pytest

from megablocks_core.data import IndexedDataset
from megablocks_core.data.tools import inspect
from megablocks_core.data.tools.records import refuse_inputs, write_source

from .conftest import build


def test_the_record_names_parts_by_their_hashes(tmp_path):
    parts = [IndexedDataset(build(tmp_path / name, [[1, 2], [3]])) for name in "ab"]
    (tmp_path / "b.manifest.json").unlink()  # as another tool leaves a dataset
    parts[1] = IndexedDataset(tmp_path / "b")
    out = build(tmp_path / "out", [[1]])
    write_source(out, "merge", parts, command_line=["x", "y"], facts={"seed": 3})
    source = inspect(out).source
    assert source["format"] == "megablocks_core.data.tools.merge"
    assert (source["command_line"], source["seed"]) == (["x", "y"], 3)
    one, other = source["parts"]
    manifest = json.loads((tmp_path / "a.manifest.json").read_text())
    assert one["files"] == manifest["files"] and other["files"] is None
    assert (one["prefix"], one["documents"], one["tokens"]) == (str(tmp_path / "a"), 2, 3)
    assert other["fingerprint"] == parts[1].fingerprint


def test_an_input_is_no_output_by_whatever_name(tmp_path):
    inputs = [IndexedDataset(build(tmp_path / "a", [[1]]))]
    os.symlink(tmp_path / "a.bin", tmp_path / "b.bin")
    refuse_inputs(str(tmp_path / "c"), inputs)
    for name in "ab":
        with pytest.raises(ValueError, match=f"out='{tmp_path}/{name}' must not be an input"):
            refuse_inputs(str(tmp_path / name), inputs)
