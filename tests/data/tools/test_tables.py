"""What was found, in lines."""

import json

import numpy as np

from megablocks_core.data.tools import check, inspect, show
from megablocks_core.data.tools.tables import (
    as_json,
    check_lines,
    inspection_lines,
    part_lines,
    table,
)

from .conftest import build


def test_columns_stand_one_under_the_other():
    assert list(table(("name", "n"), [("a", "1"), ("longer", "1,000")])) == [
        "  name        n",
        "  a           1",
        "  longer  1,000",
    ]


def test_an_inspection(tmp_path):
    prefix = build(tmp_path / "a", [[1] * n for n in (0, 1, 5, 5)], tokenizer="gpt2")
    lines = list(inspection_lines(inspect(prefix, vocab_size=1)))
    assert lines[0] == prefix
    assert "  tokens     11 of uint16" in lines
    assert "  ids        1 to 1; 11 outside a vocabulary of 1" in lines
    assert "  tokenizer  gpt2" in lines
    assert "  lengths    0 to 5, mean 2.8, median 1, p90 5, p99 5; 1 empty" in lines
    assert lines[-1].split() == ["4", "to", "7", "2", "10", "#" * 30]
    (tmp_path / "a.manifest.json").unlink()
    lines = list(inspection_lines(inspect(prefix, read_ids=False)))
    assert "  manifest   none: another tool wrote the files" in lines
    assert not [line for line in lines if line.startswith("  ids")]
    assert list(inspection_lines(inspect(build(tmp_path / "b", []))))  # no lengths, no ids


def test_a_check(tmp_path):
    one, other = build(tmp_path / "a", [[1, 2], [1, 2], [3]]), build(tmp_path / "b", [[3]])
    lines = list(check_lines(check([one], against=[other])))
    assert lines[0].split() == [
        *("dataset", "documents", "empty", "repeated", "its", "tokens"),
        *("overlap", "its", "tokens"),
    ]
    assert lines[1].split() == [one, "3", "0", "1", "2", "(40.00%)", "1", "1", "(20.00%)"]
    assert lines[2:] == [
        "repeated, the first 1",
        f"  {one} document 1  is  {one} document 0  (2 tokens)",
        "overlap, the first 1",
        f"  {one} document 2  is  {other} document 0  (1 tokens)",
    ]
    assert len(list(check_lines(check([other])))) == 2


def test_a_part(tmp_path):
    prefix = build(tmp_path / "a", [[104, 10, 105]], tokenizer="bytes")
    assert list(part_lines(show(prefix, 0))) == [
        f"{prefix}  document 0  tokens 0 to 3 (3)",
        "  | h",
        "  | i",
    ]
    plain = build(tmp_path / "b", [[104, 10, 105]])
    assert list(part_lines(show(plain, 0, most=2))) == [
        f"{plain}  document 0  tokens 0 to 3 (3, the first 2 shown)",
        "  | 104 10",
    ]


def test_values_for_json(tmp_path):
    prefix = build(tmp_path / "a", [[7, 8]])
    found = as_json(inspect(prefix))
    assert json.loads(json.dumps(found)) == found
    assert found["lengths"]["histogram"] == [{"least": 2, "most": 3, "documents": 1, "tokens": 2}]
    assert found["manifest"]["files"][".bin"]["size"] == 4
    assert as_json([show(prefix, 0)])[0]["ids"] == np.array([7, 8]).tolist()
