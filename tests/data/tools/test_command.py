"""``megablocks-data`` says what it found, and its exit status says how it went."""

import json
import subprocess
import sys

import pytest

from megablocks_core.data.tools import check, inspect, inspect_recipe, open_recipe, show, show_step
from megablocks_core.data.tools.command import main
from megablocks_core.data.tools.tables import as_json

from .conftest import build, contents, names


@pytest.fixture
def prefix(tmp_path):
    return build(tmp_path / "a", [[104, 105], [1, 2, 3], [104, 105]], tokenizer="bytes")


def run(capsys, *words, status=0):
    assert main(list(map(str, words))) == status
    told = capsys.readouterr()
    assert bool(told.err) == (status == 2 or (status == 1 and not told.out))
    return told.out + told.err


def test_inspect(prefix, recipe_file, capsys):
    assert "3 of uint16" not in run(capsys, "inspect", prefix, "--index-only")
    said = json.loads(run(capsys, "inspect", prefix, "--json", "--tokenizer", "bytes"))
    assert said == {"datasets": [as_json(inspect(prefix, vocab_size=257))]}
    path = recipe_file()
    assert "40 steps, 160 samples" in run(capsys, "inspect", "--recipe", path)
    said = json.loads(run(capsys, "inspect", "--recipe", path, "--json"))
    assert said == as_json(inspect_recipe(open_recipe(path)))


def test_verify(prefix, tmp_path, capsys):
    assert run(capsys, "verify", prefix) == f"{prefix}: whole\n"
    said = run(capsys, "verify", prefix, "--vocab-size", 105, status=1)
    assert "2 tokens are no ids below vocab_size=105" in said
    said = json.loads(run(capsys, "verify", prefix, tmp_path / "none", "--json", status=1))
    assert [len(one["faults"]) for one in said["datasets"]] == [0, 1]
    (tmp_path / "a.manifest.json").unlink()
    assert "whole by its index; no manifest" in run(capsys, "verify", prefix)


def test_check(prefix, tmp_path, capsys):
    other = build(tmp_path / "b", [[1, 2, 3]])
    said = run(capsys, "check", prefix, "--against", other, status=1)
    assert f"{prefix} document 2  is  {prefix} document 0  (2 tokens)" in said
    words = ["check", prefix, "--against", other, "--json", "--memory", 4, "--folder", tmp_path]
    said = json.loads(run(capsys, *words, status=1))
    assert said == {**as_json(check([prefix], against=[other])), "found": True}
    run(capsys, "check", other)
    assert "memory=3145728 must be" in run(capsys, "check", other, "--memory", 3, status=2)


def test_show(prefix, recipe_file, capsys):
    assert run(capsys, "show", prefix, "--document", 0).splitlines()[1] == "  | hi"
    said = json.loads(run(capsys, "show", prefix, "--document", 1, "--json"))
    assert said == as_json(show(prefix, 1))
    path = recipe_file()
    words = ["show", "--recipe", path, "--step", 3, "--tokenizer", "bytes"]
    found = show_step(open_recipe(path), 3, tokenizer="bytes")
    assert json.loads(run(capsys, *words, "--json")) == {"samples": as_json(found)}
    said = run(capsys, *words).splitlines()
    assert [line for line in said if line.startswith("sample")] == [
        f"sample {number}" for number in range(12, 16)
    ]
    assert "\\x1b" in run(capsys, "show", escaping(prefix), "--document", 0)


def escaping(prefix):
    """A document that would clear the screen of a terminal."""
    return build(f"{prefix}-escape", [[27, 91, 50, 74]], tokenizer="bytes")


def test_merge_and_split(prefix, tmp_path, capsys):
    other = build(tmp_path / "b", [[70000]], "int32", tokenizer="bytes")
    said = run(capsys, "merge", tmp_path / "m", prefix, other)
    assert said == (
        f"{tmp_path}/m: 4 documents, 8 tokens of int32, which some parts were converted to\n"
    )
    words = ["merge", str(tmp_path / "m"), prefix, other, "--overwrite", "--json"]
    assert json.loads(run(capsys, *words))["documents"] == 4
    assert inspect(tmp_path / "m").source["command_line"] == ["megablocks-data", *words]
    assert "exists; overwrite=True" in run(capsys, "merge", tmp_path / "m", prefix, status=1)
    words = ["split", tmp_path / "m", "--out", tmp_path / "s", "--fractions", "1,1"]
    said = run(capsys, *words, "--names", "x,y", "--seed", 3, "--by", "place")
    assert said.splitlines()[1:] == [
        f"  {tmp_path}/s-x          2       5",
        f"  {tmp_path}/s-y          2       3",
    ]
    assert contents(tmp_path / "s-y") == [[104, 105], [70000]]
    said = json.loads(run(capsys, *words, "--json"))
    assert [one["name"] for one in said["splits"]] == ["0", "1"]


def test_plot(prefix, recipe_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(capsys, "plot", prefix, "--out", tmp_path / "a.svg") == f"{tmp_path}/a.svg\n"
    run(capsys, "plot", "--recipe", recipe_file(), "--out", tmp_path / "b.svg")
    assert {"a.svg", "b.svg"} <= set(names(tmp_path))


def test_convert(prefix, tmp_path, capsys):
    said = run(capsys, "convert", prefix, f"olmo:{tmp_path}/o", "--eos", 0)
    assert "3 documents" in said
    back = ["convert", f"olmo:{tmp_path}/o", tmp_path / "b", "--eos", 0]
    run(capsys, *back, "--source-dtype", "uint16")
    assert [[one for one in ids if one] for ids in contents(tmp_path / "b")] == contents(prefix)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["inspect"], 2, "at least one PREFIX must be given"),
        (["inspect", "a", "--recipe", "r"], 2, "must not be given together"),
        (["inspect", "none"], 1, "No such file"),
        (["inspect", "a", "--vocab-size", "1", "--tokenizer", "bytes"], 2, "not be given together"),
        (["inspect", "--recipe", "none"], 1, "No such file"),
        (["verify", "none"], 1, "No such file"),
        (["check", "a", "a"], 2, "must be named once"),
        (["check", "damaged"], 1, "damaged.idx: lists 3 sequences"),
        (["merge", "m", "damaged"], 1, "damaged.idx: lists 3 sequences"),
        (["merge", "a", "a"], 2, "must not be an input"),
        (["split", "damaged", "--out", "s", "--fractions", "1,1"], 1, "damaged.idx: lists 3"),
        (["split", "a", "--out", "no/s", "--fractions", "1,1"], 1, "must be a folder that exists"),
        (["split", "a", "--out", "s", "--fractions", "x"], 2, "must be several numbers"),
        (["show", "a"], 2, "must have --recipe and --step, or PREFIX and --document"),
        (["show", "--recipe", "r"], 2, "must have --recipe and --step, or PREFIX and --document"),
        (["show", "a", "--document", "3"], 2, "document 3 of 3"),
        (["show", "a", "--document", "0", "--tokenizer", "x"], 2, "tokenizer='x' must be"),
        (["plot", "--out", "x.svg"], 2, "must have PREFIX or --recipe"),
        (["plot", "a", "--out", "x.png"], 2, "must end in .svg"),
    ],
)
def test_exit_status_of_faults(prefix, tmp_path, monkeypatch, capsys, words, status, message):
    monkeypatch.chdir(tmp_path)
    for ending, data in ((".idx", None), (".bin", b"12")):
        whole = (tmp_path / f"a{ending}").read_bytes()
        (tmp_path / f"damaged{ending}").write_bytes(whole if data is None else data)
    assert message in run(capsys, *words, status=status)


def test_as_a_program(prefix, tmp_path):
    module = [sys.executable, "-m", "megablocks_core.data.tools.command"]
    done = subprocess.run([*module, "check", "a"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    done = subprocess.run([*module, "none"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "invalid choice" in done.stderr
