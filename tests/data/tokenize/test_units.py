"""Units follow from the inputs alone, and cover every byte of them once."""

import gzip

import pytest

from megablocks_core.data.tokenize.inputs import find_inputs
from megablocks_core.data.tokenize.units import Held, Lines, Rows, Texts, plan

from .conftest import write_parquet


def planned(folder, unit_bytes=500, **options):
    options = {"key": "text", "max_bytes": 10**6, **options}
    return list(plan(find_inputs([folder]), unit_bytes=unit_bytes, **options))


@pytest.mark.parametrize("unit_bytes", [64, 500, 10**7])
def test_units_are_of_all_files_in_order_and_all_their_bytes(corpus, unit_bytes):
    folder, _ = corpus
    inputs = find_inputs([folder])
    units = planned(folder, unit_bytes)
    files = [file for unit in units for file in unit.files]
    assert files == sorted(files)
    assert set(files) == set(range(len(inputs)))
    assert sum(unit.nbytes for unit in units) == sum(given.size for given in inputs)
    for done in (0, 1, len(units) - 1, len(units)):
        assert planned(folder, unit_bytes, done=done) == units[done:]


def test_lines_are_ranges_of_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 1200)
    ranges = [(unit.start, unit.stop) for unit in planned(tmp_path) if isinstance(unit, Lines)]
    assert ranges == [(0, 500), (500, 1000), (1000, 1200)]


def test_small_texts_go_together_and_a_large_one_alone(tmp_path):
    for name, size in (("a", 200), ("b", 200), ("c", 200), ("d", 900), ("e", 0)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert [unit.files for unit in planned(tmp_path) if isinstance(unit, Texts)] == [
        (0, 1),
        (2,),
        (3,),
        (4,),
    ]


def test_rows_are_cut_by_the_size_of_their_column(tmp_path):
    texts = [f"{n:03}" * 40 for n in range(100)]
    write_parquet(tmp_path / "a.parquet", texts, rows=30)
    units = [unit for unit in planned(tmp_path, 1000) if isinstance(unit, Rows)]
    rows = [(unit.group, row) for unit in units for row in range(unit.start, unit.stop)]
    assert rows == [(row // 30, row % 30) for row in range(100)]
    assert all(unit.stop - unit.start <= 16 for unit in units)
    ends = [at for unit in units for at in unit.hashed]
    assert ends == sorted(ends)
    assert ends[-1] == (tmp_path / "a.parquet").stat().st_size


def test_parquet_without_the_column_or_of_numbers_or_damaged_is_one_unit_with_a_fault(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], key="other")
    write_parquet(tmp_path / "b.parquet", [3, 4])
    (tmp_path / "c.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "d.parquet").write_bytes(b"")
    write_parquet(tmp_path / "e.parquet", ["x"])
    whole = (tmp_path / "e.parquet").read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[: len(whole) // 2])
    faults = [unit.fault for unit in planned(tmp_path, 10**6) if isinstance(unit, Rows)]
    unreadable = "is no Parquet file that can be read"
    assert faults == [
        "has no column 'text'",
        "has no text in column 'text'",
        unreadable,
        unreadable,
        unreadable,
    ]


def test_compressed_lines_are_held_in_whole_lines(tmp_path):
    data = b"".join(b'{"text": "%d"}\n' % n for n in range(9000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    units = [unit for unit in planned(tmp_path, 5000) if isinstance(unit, Held)]
    assert len(units) > 2
    assert b"".join(unit.data for unit in units) == data
    assert [unit.first for unit in units] == [True] + [False] * (len(units) - 1)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    import sys

    write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"megablocks-core\[tokenize\]"):
        planned(tmp_path)
