"""Which files are tokenised, in which order, as what."""

import pytest

from megablocks_core.data.tokenize.inputs import LINES, ROWS, TEXT, find_inputs, refuse_changed


def test_files_are_in_the_order_given_and_those_of_a_folder_sorted(tmp_path):
    for name in ("b/z.txt", "b/a/y.txt", "a.txt", "b/.hidden", "b/.git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([tmp_path / "b", tmp_path / "a.txt"])
    names = [str(one.path).removeprefix(f"{tmp_path}/") for one in found]
    assert names == ["b/a/y.txt", "b/z.txt", "a.txt"]
    assert len(find_inputs([tmp_path / "b" / ".hidden"])) == 1  # it was named


def test_formats_are_told_by_the_ends_of_names(tmp_path):
    expected = {
        "a.jsonl": (LINES, ""),
        "a.NDJSON": (LINES, ""),
        "a.jsonl.gz": (LINES, "gz"),
        "a.json.zst": (LINES, "zst"),
        "a.json": (TEXT, ""),
        "a.parquet": (ROWS, ""),
        "a.txt.gz": (TEXT, "gz"),
        "README": (TEXT, ""),
    }
    for name in expected:
        (tmp_path / name).write_text("x")
    found = {
        one.path.split("/")[-1]: (one.format, one.compression) for one in find_inputs([tmp_path])
    }
    assert found == expected


def test_suffixes_choose_files_of_folders(tmp_path):
    for name in ("a.txt", "b.py"):
        (tmp_path / name).write_text("x")
    assert [one.path[-4:] for one in find_inputs([tmp_path], [".py"])] == ["b.py"[-4:]]
    assert len(find_inputs([tmp_path / "a.txt"], [".py"])) == 1  # a file that is named


def test_a_file_that_changes_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    found = find_inputs([tmp_path])
    refuse_changed(found)
    (tmp_path / "a.txt").write_text("xy")
    with pytest.raises(ValueError, match=r"a\.txt: was changed"):
        refuse_changed(found)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt: was changed"):
        refuse_changed(found)


@pytest.mark.parametrize(
    ("paths", "suffixes", "message"),
    [
        (["nowhere"], [], "'nowhere' must be a file or folder that exists"),
        ([], [], "at least one file"),
        ("a.txt", [], "must be several"),
        ([3], [], "must be paths"),
        ([], [3], "must be ends of names"),
    ],
)
def test_wrong_paths_are_refused(paths, suffixes, message):
    with pytest.raises(ValueError, match=message):
        find_inputs(paths, suffixes)
