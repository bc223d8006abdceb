"""``megablocks-data convert`` hands on its arguments and says what was written."""

import argparse
import json

import pytest

from megablocks_core.data.convert import command

from .conftest import contents, documents, write


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(one) for one in arguments]))


def test_there_and_back(tmp_path, corpus, capsys):
    prefix, rows = corpus
    there = f"mds:{tmp_path / 'm'}"
    options = ("--shard-bytes", 50_000, "--compression", "zstd:1", "--target-dtype", "int32")
    assert run(prefix, there, *options) == 0
    said = capsys.readouterr().out
    tokens = sum(map(len, rows))
    assert said.startswith(f"{there}: {len(rows):,} documents, {tokens:,} tokens of int32 in ")
    assert said.count("\n") == 1
    write(tmp_path / "y", [[1]])
    assert run(there, tmp_path / "y", "--overwrite", "--target-dtype", "uint16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(rows)
    assert contents(tmp_path / "y") == contents(prefix)


def test_what_was_met_is_said(tmp_path, capsys):
    prefix = write(tmp_path / "x", [[1, 0], [0, 1]])
    assert run(prefix, f"olmo:{tmp_path / 'o'}", "--eos", 0) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"olmo:{tmp_path / 'o'}: 2 documents, 5 tokens of uint16 in 1 file",
        "1 documents were given an end",
        "1 ends of document stand inside documents",
    ]
    assert run(f"olmo:{tmp_path / 'o'}", tmp_path / "y", "--source-dtype", "uint16") == 0
    assert documents(tmp_path / "y") == [[1, 0], [0, 1, 0]]


def test_texts_are_encoded(tmp_path, capsys):
    from .test_mds import save, sized

    source = save(tmp_path / "m", [sized(b"ab"), sized(b"")], {"mine": "str"})
    options = ("--column", "mine", "--tokenizer", "bytes", "--append-eod")
    assert run(source, tmp_path / "x", *options) == 0
    assert documents(tmp_path / "x") == [[*b"ab", 256]]
    assert "1 empty texts gave no document" in capsys.readouterr().out


def test_a_bad_source_is_said_in_a_line_with_status_1(tmp_path, capsys):
    (tmp_path / "a.npy").write_bytes(b"\1\0\2")
    options = ("--source-dtype", "uint16", "--eos", 0)
    assert run(f"olmo:{tmp_path / 'a.npy'}", tmp_path / "x", *options) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"megablocks-data: {tmp_path / 'a.npy'}: holds 3 bytes, no whole")
    assert (said.out, said.err.count("\n")) == ("", 1)
    with pytest.raises(ValueError, match="eos=70000 must be an id"):
        run(f"olmo:{tmp_path / 'a.npy'}", tmp_path / "x", *options[:-1], 70000)
