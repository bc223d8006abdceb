"""OLMo's files: read by the id that ends documents or by the lines beside them, and written."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablocks_core.data.convert import convert, olmo

from .conftest import contents, documents, some_documents, write

EOS = 0


def olmo_documents(path, dtype, eos):
    """What OLMo-core reads: whatever ends with the id; by definition, one id after the other."""
    found, row = [], []
    for token in np.memmap(path, dtype, "r").tolist():
        row.append(token)
        if token == eos:
            found.append(row)
            row = []
    return found


def test_a_round_trip_has_the_same_bytes(tmp_path):
    prefix = write(tmp_path / "x", some_documents(end=EOS))
    report = convert(prefix, f"olmo:{tmp_path / 'o'}", eos=EOS, shard_bytes=20_000)
    assert (report.ends_added, report.inner_ends, report.dtype) == (0, 0, "uint16")
    assert report.files == len(list((tmp_path / "o").glob("*.npy"))) > 5
    for name, eos in (("by_end", EOS), ("by_lines", None)):
        convert(f"olmo:{tmp_path / 'o'}", tmp_path / name, source_dtype="uint16", eos=eos)
        assert contents(tmp_path / name) == contents(prefix)


def test_files_are_bare_ids_and_lines_cover_them(tmp_path):
    rows = [[5, 6, EOS], [7, EOS], [8, 9, 10, EOS]]
    convert(write(tmp_path / "x", rows), f"olmo:{tmp_path / 'o'}", eos=EOS, shard_bytes=10)
    first, second = sorted((tmp_path / "o").glob("*.npy"))
    assert first.read_bytes() == np.array(rows[0] + rows[1], "<u2").tobytes()
    assert olmo_documents(second, "<u2", EOS) == rows[2:]
    lines = [gzip.decompress(path.read_bytes()) for path in sorted((tmp_path / "o").glob("*.gz"))]
    assert lines == [b"0,3\n3,5\n", b"0,4\n"]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=9),
    st.integers(1, 30),
)
def test_missing_ends_are_added_and_inner_ones_counted(tmp_path_factory, rows, shard_bytes):
    folder = tmp_path_factory.mktemp("x")
    prefix = write(folder / "x", rows)
    report = convert(prefix, f"olmo:{folder / 'o'}", eos=EOS, shard_bytes=shard_bytes)
    ended = [row if row[-1:] == [EOS] else [*row, EOS] for row in rows]
    for path in (folder / "o").glob("*.npy"):
        spans = gzip.decompress(path.with_suffix(".csv.gz").read_bytes()).count(b"\n")
        assert path.stat().st_size <= shard_bytes or spans == 1
    read = [
        document
        for path in sorted((folder / "o").glob("*.npy"))
        for document in olmo_documents(path, "<u2", EOS)
    ]
    assert sum(read, []) == sum(ended, [])
    assert report.ends_added == sum(row[-1:] != [EOS] for row in rows)
    assert report.inner_ends == len(read) - len(rows)
    assert (report.documents, report.tokens) == (len(rows), len(sum(ended, [])))
    convert(f"olmo:{folder / 'o'}", folder / "y", source_dtype="uint16")
    assert documents(folder / "y") == ended


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 7))
def test_documents_by_end_do_not_depend_on_blocks(tokens, block):
    counts = olmo.Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(olmo, "RUN", block)
        batches = list(olmo._by_end(np.array(tokens, np.uint16), 0, counts))
    found = [document.tolist() for batch in batches for document in batch.documents()]
    assert sum(found, []) == tokens
    assert all(document.count(0) == (document[-1] == 0) for document in found)
    assert counts.unterminated == bool(tokens and tokens[-1] != 0)
    assert sum(document[-1] != 0 for document in found) == counts.unterminated


def test_wide_ids_are_narrowed_where_all_fit(tmp_path):
    (tmp_path / "o").mkdir()
    np.array([5, 2**31 - 1, 0], "<u4").tofile(tmp_path / "o" / "b.npy")
    np.array([7, 0, 9], "<u4").tofile(tmp_path / "o" / "a.npy")
    source = f"olmo:{tmp_path / 'o'}"
    report = convert(source, tmp_path / "x", source_dtype="uint32", eos=0)
    assert (report.dtype, report.unterminated) == ("int32", 1)
    assert documents(tmp_path / "x") == [[7, 0], [9], [5, 2**31 - 1, 0]]
    np.array([2**31], "<u4").tofile(tmp_path / "o" / "b.npy")
    with pytest.raises(ValueError, match="token id 2147483648 must be from"):
        convert(source, tmp_path / "y", source_dtype="uint32", eos=0)
    assert not list(tmp_path.glob("y*"))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"0,2\n3,4\n", r"a.csv.gz:2 has the document 3 to 4, must go on at 2 within 4 tokens"),
        (b"0,2\n2,5\n", r"a.csv.gz:2 has the document 2 to 5"),
        (b"0,2\n2,1\n", r"a.csv.gz:2 has the document 2 to 1"),
        (b"0,2\n", r"a.csv.gz: ends at token 2, must end at 4"),
        (b"0,2\nstart,end\n", r"a.csv.gz:2 must begin with start,end"),
        (b"0\n", r"a.csv.gz:1 must begin with start,end"),
    ],
)
def test_lines_that_do_not_cover_the_tokens_are_refused(tmp_path, lines, told):
    np.array([1, 2, 3, 4], "<u2").tofile(tmp_path / "a.npy")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(lines))
    with pytest.raises(ValueError, match=told):
        convert(f"olmo:{tmp_path / 'a.npy'}", tmp_path / "x", source_dtype="uint16")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,1,id,file.jsonl,1\n1,4,id,f,2\n"))
    convert(f"olmo:{tmp_path / 'a.npy'}", tmp_path / "x", source_dtype="uint16")
    assert documents(tmp_path / "x") == [[1], [2, 3, 4]]


def test_lines_cut_short_are_refused(tmp_path):
    np.arange(4000, dtype="<u2").tofile(tmp_path / "a.npy")
    lines = gzip.compress("".join(f"{at},{at + 1}\n" for at in range(4000)).encode())
    (tmp_path / "a.csv.gz").write_bytes(lines[:-9])
    with pytest.raises(ValueError, match=r"a\.csv\.gz: is damaged after line"):
        convert(f"olmo:{tmp_path / 'a.npy'}", tmp_path / "x", source_dtype="uint16")


def test_what_cannot_be_files_of_olmo_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(4, dtype="<u2"))
    source = f"olmo:{path}"
    with pytest.raises(ValueError, match="has a header of NumPy"):
        convert(source, tmp_path / "x", source_dtype="uint16", eos=0)
    path.write_bytes(b"\1\0\2")
    with pytest.raises(ValueError, match="holds 3 bytes, no whole number of tokens of uint16"):
        convert(source, tmp_path / "x", source_dtype="uint16", eos=0)
    path.write_bytes(b"\1\0")
    with pytest.raises(ValueError, match="source_dtype=None must be one of uint8"):
        convert(source, tmp_path / "x", eos=0)
    with pytest.raises(ValueError, match="source_dtype='float32' must be one of"):
        convert(source, tmp_path / "x", source_dtype="float32", eos=0)
    with pytest.raises(ValueError, match="eos=65536 must be an id that uint16 holds"):
        convert(source, tmp_path / "x", source_dtype="uint16", eos=65536)
    with pytest.raises(ValueError, match=r"a\.csv\.gz is missing: give eos="):
        convert(source, tmp_path / "x", source_dtype="uint16")
    with pytest.raises(ValueError, match=r"must be a \.npy file or a folder"):
        convert(f"olmo:{tmp_path / 'none'}", tmp_path / "x", source_dtype="uint16", eos=0)
    with pytest.raises(ValueError, match="target_dtype=int32 must be one of uint8"):
        convert(write(tmp_path / "y", [[1]]), f"olmo:{tmp_path / 'o'}", target_dtype="int32")
    with pytest.raises(ValueError, match="eos=300 must be an id that uint8 holds"):
        convert(tmp_path / "y", f"olmo:{tmp_path / 'o'}", target_dtype="uint8", eos=300)
    assert not (tmp_path / "o").exists()
