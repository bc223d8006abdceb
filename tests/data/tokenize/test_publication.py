"""A finished run becomes a dataset that a builder would have written, and says where it is from."""

import json
import os
import shutil

import pytest

from megablocks_core.data import IndexedDataset, IndexedDatasetBuilder
from megablocks_core.data.tokenize import publication, tokenize

from .conftest import contents, documents, json_lines, some_texts


def test_the_files_are_those_of_a_builder(tmp_path, bpe):
    (tmp_path / "a.jsonl").write_bytes(json_lines(some_texts(50)))
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer=f"hf:{bpe}", workers=0)
    with IndexedDatasetBuilder(tmp_path / "y", dtype="uint16") as builder:
        for document in documents(tmp_path / "x"):
            builder.add_document(document)
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


def test_the_source_names_inputs_tokenizer_and_command(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc", "", "d"]))
    command = ["megablocks-tokenize", "a.jsonl"]
    tokenize(
        [tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0, command_line=command
    )
    source = json.loads((tmp_path / "x.source.json").read_text())
    manifest = IndexedDataset(tmp_path / "x").manifest
    assert source["build"] == manifest.build
    assert (source["tokenizer"], manifest.tokenizer) == ("bytes", "bytes")
    assert source["command_line"] == command
    assert (source["documents"], source["tokens"], source["empty"]) == (2, 4, 1)
    (given,) = source["inputs"]
    at = (tmp_path / "a.jsonl").stat()
    assert given["path"] == str(tmp_path / "a.jsonl")
    assert (given["size"], given["modified_ns"]) == (at.st_size, at.st_mtime_ns)


def test_hashes_of_inputs_are_those_of_their_pieces(tmp_path, corpus, monkeypatch):
    import xxhash

    from megablocks_core.data.tokenize import tokenizing

    monkeypatch.setattr(tokenizing, "UNIT_BYTES", 300)
    tokenize([corpus[0]], tmp_path / "x", tokenizer="bytes", workers=0)
    source = json.loads((tmp_path / "x.source.json").read_text())
    assert source["piece_bytes"] == 300
    assert len(source["inputs"]) == 17
    for given in source["inputs"]:
        with open(given["path"], "rb") as file:
            data = file.read()
        digests = (xxhash.xxh3_128_digest(data[at : at + 300]) for at in range(0, len(data), 300))
        expected = xxhash.xxh3_128_hexdigest(b"".join(digests))
        assert given["xxh3_128_of_pieces"] == expected


def test_no_documents_at_all(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n")
    report = tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0)
    assert (report.documents, documents(tmp_path / "x")) == (0, [])


def test_where_a_file_can_have_no_second_name_it_is_copied(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]))

    def refuse(*names):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0)
    assert documents(tmp_path / "x") == [[97, 98, 99]]


@pytest.mark.parametrize("call", ["_source", "replace_file"])
def test_a_run_that_ends_after_its_publication_is_concluded_by_the_next(
    tmp_path, monkeypatch, call
):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]) + b"bad\n")
    given = {"tokenizer": "bytes", "workers": 0, "on_bad": "report"}

    def dies(*arguments):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(publication, call, dies)
        with pytest.raises(RuntimeError, match="killed"):
            tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given)
    build = IndexedDataset(tmp_path / "x").manifest.build
    report = tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given)
    assert (report.documents, report.bad) == (1, {"is not JSON": 1})
    assert IndexedDataset(tmp_path / "x").manifest.build == build  # nothing was made again
    assert json.loads((tmp_path / "x.source.json").read_text())["build"] == build
    assert json.loads((tmp_path / "x.bad.jsonl").read_text())["line"] == 2
    assert not (tmp_path / "x.tokenizing").exists()
    with pytest.raises(FileExistsError):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "x", **given)


def test_an_older_list_of_bad_lines_does_not_outlive_its_dataset(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]) + b"bad\n")
    given = {"tokenizer": "bytes", "workers": 0}
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", on_bad="report", **given)
    assert (tmp_path / "x.bad.jsonl").exists()
    tokenize([tmp_path / "a.jsonl"], tmp_path / "x", on_bad="skip", overwrite=True, **given)
    assert not (tmp_path / "x.bad.jsonl").exists()


def test_a_dataset_that_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc"]))
    real = publication.Staging.adopt

    def appears(files, *arguments):
        (tmp_path / "x.idx").write_bytes(b"precious")
        return real(files, *arguments)

    monkeypatch.setattr(publication.Staging, "adopt", appears)
    with pytest.raises(FileExistsError):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "x", tokenizer="bytes", workers=0)
    assert (tmp_path / "x.idx").read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "x.idx", "x.tokenizing"]
    (tmp_path / "x.idx").unlink()
    shutil.rmtree(tmp_path / "x.tokenizing")
