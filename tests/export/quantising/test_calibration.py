"""Calibrations come back from files as they were, and what is none is refused by name."""

import json

import pytest

from megablocks_core.export.quantising.calibration import Calibration

FOUND = Calibration({"a.weight": 1.5, "b.weight": 0.1}, {"k.weight": 3e38}, {"v.weight": 0.0})


def test_a_file_gives_back_the_same_numbers(tmp_path):
    path = tmp_path / "new" / "calibration.json"
    FOUND.save(path)
    assert Calibration.load(path) == FOUND
    Calibration({}, {}, {}).save(path)
    assert Calibration.load(path) == Calibration({}, {}, {})
    assert [one.name for one in path.parent.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    "value", [-1.0, float("nan"), float("inf"), 3.5e38, 10**39, "1", None, True]
)
def test_what_is_no_magnitude_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"keys\['k\.weight'\]=.* must be a number of float32"):
        Calibration({}, {"k.weight": value}, {})
    with pytest.raises(ValueError, match=r"inputs=\[\] must be a mapping"):
        Calibration([], {}, {})  # pyright: ignore[reportArgumentType]


def _cut(said):
    del said["values"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda said: said.update(version=2), "version 1, not .* of 2"),
        (lambda said: said.update(format="other"), "must be a megablocks_core calibration"),
        (_cut, "must hold .'inputs', 'keys', 'values'."),
        (lambda said: said.update(more={}), "must hold .'inputs', 'keys', 'values'."),
        (lambda said: said["inputs"].update(x=-1), r"inputs\['x'\]=-1 must be a number of float32"),
        (lambda said: said.update(keys=[]), r"keys=\[\] must be a mapping"),
    ],
)
def test_files_that_are_something_else_are_refused_by_name(tmp_path, change, rule):
    path = tmp_path / "calibration.json"
    FOUND.save(path)
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"{path.name}.*{rule}"):
        Calibration.load(path)


def test_files_that_are_missing_or_cut_off_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json is missing"):
        Calibration.load(tmp_path / "none.json")
    path = tmp_path / "calibration.json"
    FOUND.save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"calibration\.json is not JSON"):
        Calibration.load(path)
