"""``megablocks-tokenize`` says what it did, and its exit status says how it went."""

import json
import subprocess
import sys

import pytest

from megablocks_core.data.tokenize.command import main

from .conftest import END, documents, json_lines


def test_a_run(tmp_path, bpe, capsys):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["the model", "", f"a{END}"]) + b"bad\n")
    arguments = [
        *(str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "x"), "--tokenizer", f"hf:{bpe}"),
        *("--append-eod", "--workers", "1", "--on-bad", "report", "--engine", "hf"),
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{tmp_path}/x: 2 documents, ")
    assert said[1:] == [
        "1 empty texts gave no document",
        "1 ends of document stood in the texts",
        "left out: 1 x is not JSON",
        f"their places: {tmp_path}/x.bad.jsonl",
    ]
    source = json.loads((tmp_path / "x.source.json").read_text())
    assert source["command_line"] == ["megablocks-tokenize", *arguments]


def test_an_end_by_token_or_id(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"], key="content"))
    given = [str(tmp_path), "--tokenizer", "bytes", "--key", "content", "--workers", "0"]
    given += ["--suffix", ".jsonl", "--out", str(tmp_path / "x"), "--eod", "65"]
    assert main(given) == 0
    assert documents(tmp_path / "x") == [[97, 65]]


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        ([], 1, "a.jsonl: line 2 is not JSON"),
        (["--eod", "nothing"], 2, "append_eod='nothing' must be"),
        (["--out", "no/where/x"], 1, "must be a folder that exists"),
        (["--engine", "gigatoken"], 2, "must have a tokenizer hf:PATH"),
    ],
)
def test_faults(tmp_path, capsys, extra, status, message):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"]) + b"bad\n")
    given = [str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--workers", "0"]
    assert main([*given, "--out", str(tmp_path / "x"), *extra]) == status
    assert message in capsys.readouterr().err


def test_as_a_program(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    module = [sys.executable, "-m", "megablocks_core.data.tokenize.command"]
    given = ["a.txt", "--out", "x", "--tokenizer", "bytes"]
    done = subprocess.run([*module, *given], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "x: 1 documents, 3 tokens of uint16 from 3 bytes of text, by hf\n"
    done = subprocess.run([*module, *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exists; overwrite=True replaces the dataset" in done.stderr
