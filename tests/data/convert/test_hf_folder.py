"""Folders of Hugging Face datasets: as that library writes them, and as it reads them."""

import json

import numpy as np
import pyarrow
import pytest

from megablocks_core.data.convert import convert
from megablocks_core.data.convert.documents import BadSource
from megablocks_core.data.convert.hf_folder import HFFolder

from .conftest import contents, documents, some_documents, write


def save(folder, table, rows=3):
    """A folder of two files, each of several batches, as ``save_to_disk`` writes it."""
    folder.mkdir()
    half = len(table) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table[:half], table[half:]), strict=True):
        with (
            open(folder / name, "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=rows)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return f"datasets:{folder}"


def ids_table(rows, kind="list", value=None, name="input_ids"):
    value = value or pyarrow.int32()
    lists = {
        "list": pyarrow.list_(value),
        "large": pyarrow.large_list(value),
        "fixed": pyarrow.list_(value, len(rows[0])),
    }
    ids = pyarrow.array(rows, lists[kind])
    return pyarrow.table({"other": ["x"] * len(rows), name: ids})


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float64"])
def test_a_round_trip_has_the_same_bytes(tmp_path, dtype):
    if dtype == "float64":
        prefix = write(tmp_path / "x", [[0.5, 2.0], [], [3.25]], dtype)
    else:
        prefix = write(tmp_path / "x", [[], *some_documents(most=200), []], dtype)
    report = convert(prefix, f"datasets:{tmp_path / 'h'}", shard_bytes=30_000)
    assert report.dtype == dtype
    names = sorted(path.name for path in (tmp_path / "h").glob("*.arrow"))
    total = len(names)
    assert names == [f"data-{index:05}-of-{total:05}.arrow" for index in range(total)]
    if dtype == "float64":
        with pytest.raises(ValueError, match="must be lists of whole numbers, or texts"):
            convert(f"datasets:{tmp_path / 'h'}", tmp_path / "y")
        return
    convert(f"datasets:{tmp_path / 'h'}", tmp_path / "y")
    assert contents(tmp_path / "y") == contents(prefix)


def test_files_are_cut_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr("megablocks_core.data.convert.documents.Batch.runs.__defaults__", (500,))
    prefix = write(tmp_path / "x", some_documents())
    report = convert(prefix, f"datasets:{tmp_path / 'h'}", shard_bytes=20_000)
    assert report.files > 5
    sizes = [path.stat().st_size for path in (tmp_path / "h").glob("*.arrow")]
    assert max(sizes) < 45_000  # one document more, and what Arrow says of each batch
    convert(f"datasets:{tmp_path / 'h'}", tmp_path / "y")
    assert contents(tmp_path / "y") == contents(prefix)


@pytest.mark.parametrize("kind", ["list", "large", "fixed"])
def test_lists_of_any_kind_are_documents(tmp_path, kind):
    rows = [[row, row + 1, 70_000] for row in range(11)]
    if kind != "fixed":
        rows[4] = []
    report = convert(save(tmp_path / "h", ids_table(rows, kind)), tmp_path / "x")
    assert documents(tmp_path / "x") == rows
    assert report.dtype == "int32"


def test_ids_of_wide_dtypes_are_stored_in_what_is_asked_for(tmp_path):
    source = save(tmp_path / "h", ids_table([[1], [2, 65535]], value=pyarrow.int64()))
    assert convert(source, tmp_path / "x").dtype == "int64"
    assert convert(source, tmp_path / "y", target_dtype="uint16").dtype == "uint16"
    assert documents(tmp_path / "x") == documents(tmp_path / "y") == [[1], [2, 65535]]
    with pytest.raises(ValueError, match="token id 65535 must be from -32768 to 32767"):
        convert(source, tmp_path / "z", target_dtype="int16")


def test_texts_become_documents_of_ids(tmp_path):
    table = pyarrow.table({"id": [1, 2, 3, 4], "text": ["ab", "", "naïve", "\U0001f600"]})
    source = save(tmp_path / "h", table, rows=1)
    report = convert(source, tmp_path / "x", tokenizer="bytes", append_eod=True)
    texts = ["ab", "naïve", "\U0001f600"]
    assert documents(tmp_path / "x") == [[*text.encode(), 256] for text in texts]
    assert (report.documents, report.empty) == (3, 1)
    with pytest.raises(ValueError, match="tokenizer=None must name one"):
        convert(source, tmp_path / "y")


def test_a_column_is_named_or_found(tmp_path):
    table = ids_table([[1], [2]], name="tokens").append_column("mine", pyarrow.array([[5], [6]]))
    source = save(tmp_path / "h", table)
    convert(source, tmp_path / "x")
    convert(source, tmp_path / "y", column="mine")
    assert (documents(tmp_path / "x"), documents(tmp_path / "y")) == ([[1], [2]], [[5], [6]])
    with pytest.raises(ValueError, match=r"columns \['other', 'tokens', 'mine'\], must have no"):
        convert(source, tmp_path / "z", column="no")
    with pytest.raises(ValueError, match="column 'other' is double"):
        table = table.set_column(0, "other", pyarrow.array([0.5, 1.5]))
        convert(save(tmp_path / "g", table), tmp_path / "z", column="other")


@pytest.mark.parametrize("rows", [[[1], None, [2], [3]], [[1], [2, None], [3], [4]]])
def test_nulls_are_refused(tmp_path, rows):
    source = save(tmp_path / "h", ids_table(rows))
    with pytest.raises(ValueError, match=r"data-00000-of-00002.arrow: column 'input_ids' has a nu"):
        convert(source, tmp_path / "x")
    text = pyarrow.table({"text": ["a", "b", None, "c"]})
    with pytest.raises(ValueError, match=r"data-00001-of-00002.arrow: column 'text' has a null"):
        convert(save(tmp_path / "g", text), tmp_path / "x", tokenizer="bytes")
    assert not list(tmp_path.glob("x*"))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    source = save(tmp_path / "h", ids_table([[row] * 9 for row in range(12)]))
    path = tmp_path / "h" / "data-00001-of-00002.arrow"
    whole = path.read_bytes()
    for size in range(0, len(whole), 8):  # at bounds of messages too, where Arrow sees an end
        path.write_bytes(whole[:size])
        with pytest.raises(BadSource, match=r"data-00001-of-00002\.arrow: is (cut short|no str)"):
            convert(source, tmp_path / "x")
    path.unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow is missing"):
        convert(source, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


def test_changed_bytes_never_pass_for_another_kind_of_error(tmp_path):
    source = save(tmp_path / "h", ids_table([[row] * 9 for row in range(12)]))
    path = tmp_path / "h" / "data-00000-of-00002.arrow"
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(whole)
        for at in draw.integers(0, len(whole) - 8, 3).tolist():
            changed[at] = int(draw.integers(256))
        path.write_bytes(changed)
        try:
            convert(source, tmp_path / "x", overwrite=True)
        except (ValueError, OSError) as error:
            assert isinstance(error, BadSource) or "is no stream" not in str(error)


def test_folders_of_another_kind_are_refused(tmp_path):
    folder = tmp_path / "h"
    save(folder, ids_table([[1], [2]]))
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds the splits \['train', 'test'\]; name the folder"):
        HFFolder(folder, None)
    (folder / "dataset_dict.json").unlink()
    for state, told in (
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "must name files beside it"),
        ('{"_data_files": []}', "must name files beside it"),
        ('{"_data_files": 5}', "must name files beside it"),
        ('{"_indices_data_files": ["x"]}', "has rows chosen by a file"),
        ("[]", "must hold a dict"),
    ):
        (folder / "state.json").write_text(state)
        with pytest.raises(ValueError, match=told):
            HFFolder(folder, None)
    with pytest.raises(ValueError, match=r"state\.json is missing"):
        HFFolder(tmp_path / "none", None)


def test_the_library_reads_what_is_written_and_writes_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="oracle streaming")
    rows = [[], *some_documents(), []]
    prefix = write(tmp_path / "x", rows)
    convert(prefix, f"datasets:{tmp_path / 'h'}", shard_bytes=30_000)
    found = datasets.load_from_disk(tmp_path / "h")
    assert found["input_ids"][:] == rows
    assert found.features["input_ids"].feature.dtype == "uint16"
    found = found.with_format("numpy")
    assert found[3]["input_ids"].tolist() == rows[3]

    chosen = datasets.load_from_disk(tmp_path / "h").select(range(len(rows) - 1, -1, -2))
    chosen.save_to_disk(tmp_path / "chosen", num_shards=3)
    convert(f"datasets:{tmp_path / 'chosen'}", tmp_path / "y")
    assert documents(tmp_path / "y") == rows[::-2]

    texts = {"text": ["one", "", "two"]}
    datasets.Dataset.from_dict(texts).save_to_disk(tmp_path / "t")
    convert(f"datasets:{tmp_path / 't'}", tmp_path / "z", tokenizer="bytes")
    assert documents(tmp_path / "z") == [[*b"one"], [*b"two"]]

    datasets.DatasetDict({"train": chosen}).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"holds the splits \['train'\]"):
        convert(f"datasets:{tmp_path / 'd'}", tmp_path / "w")
    convert(f"datasets:{tmp_path / 'd' / 'train'}", tmp_path / "w")
    assert contents(tmp_path / "w") == contents(tmp_path / "y")
