"""The command: what it prints, and its exit status."""

import json
import subprocess
import sys

import pytest
import torch

from megablocks_core import ckpt
from megablocks_core.ckpt.tools.command import main
from megablocks_core.files import progress
from tests.ckpt.tools.saves import save_dcp, save_ours, trained
from tests.files.test_progress import Terminal


def run(capsys, *arguments):
    """(exit status, lines on stdout, lines on stderr)."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_inspect(tmp_path, capsys):
    save_ours(tmp_path / "c")
    status, out, err = run(capsys, "inspect", tmp_path / "c", "--json")
    assert (status, err) == (0, [])
    assert json.loads("\n".join(out))["entries"]["step"]["value"] == 7
    status, out, err = run(capsys, "inspect", tmp_path / "c")
    assert (status, err) == (0, []) and "  step  json  7" in out


def test_verify_names_the_tensors_and_goes_on(tmp_path, capsys):
    for name in ("a", "b", "c"):
        ckpt.save(tmp_path / name, {"x": torch.ones(3), "y": torch.ones(3)})
    flip(tmp_path / "b" / "y.safetensors")
    paths = [tmp_path / name for name in "abc"]
    status, out, (line,) = run(capsys, "verify", *paths)
    assert (status, out) == (1, [f"{tmp_path}/a: whole", f"{tmp_path}/c: whole"])
    assert line.startswith("megablocks-ckpt: ") and "['y/y']" in line
    assert run(capsys, "verify", tmp_path / "a")[0] == 0
    assert run(capsys, "verify", tmp_path / "none")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "a"),
        ("diff", "a", "b"),
        ("convert", "a", "dcp"),
        ("convert", "theirs", "ours"),
        ("average", "a", "b", "--out", "mean"),
    ],
)
def test_a_terminal_sees_how_far_what_reads_all_is(tmp_path, monkeypatch, arguments):
    for name in ("a", "b"):
        save_ours(tmp_path / name)
    save_dcp(tmp_path / "theirs", *trained())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(arguments) == 0
    assert f"\r{arguments[0]}  #" in terminal.getvalue()
    assert "/s  0:0" in terminal.getvalue() and terminal.getvalue().endswith(" \r")


def test_diff_has_the_status_of_diff(tmp_path, capsys):
    save_ours(tmp_path / "a")
    save_ours(tmp_path / "b")
    save_ours(tmp_path / "c", steps=3)
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b") == (0, [], [])
    status, out, err = run(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert (status, err) == (1, []) and "tensor model/0.weight: 60 of 60 values differ" in out[0]
    status, out, (line,) = run(capsys, "diff", tmp_path / "a", tmp_path / "none")
    assert status == 2 and "is no checkpoint" in line


def test_convert_and_average(tmp_path, capsys):
    save_dcp(tmp_path / "dcp", *trained())
    assert run(capsys, "convert", tmp_path / "dcp", tmp_path / "a") == (0, [f"{tmp_path}/a"], [])
    status, _, (line,) = run(capsys, "convert", tmp_path / "dcp", tmp_path / "a")
    assert status == 2 and "must be new or an empty folder" in line
    arguments = ("average", tmp_path / "a", tmp_path / "dcp", "--out", tmp_path / "mean")
    assert run(capsys, *arguments) == (0, [f"{tmp_path}/mean"], [])
    flip(tmp_path / "a" / "model.safetensors")
    status, _, (line,) = run(capsys, "convert", tmp_path / "a", tmp_path / "other")
    assert status == 1 and "damaged" in line


def test_prune(tmp_path, capsys):
    for number in range(1, 6):
        ckpt.save(tmp_path / f"step-{number}", {"n": number})
    gone = [f"{tmp_path}/step-{number}" for number in (1, 3)]
    arguments = ("prune", tmp_path, "--keep-last", 2, "--keep-every", 2)
    assert run(capsys, *arguments, "--dry-run") == (0, gone, [])
    assert (tmp_path / "step-1").exists()
    assert run(capsys, *arguments) == (0, gone, [])
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-2", "step-4", "step-5"]
    (tmp_path / ".step-6.0123abcd.partial").mkdir()
    left = [f"{tmp_path}/.step-6.0123abcd.partial"]
    assert run(capsys, "prune", tmp_path, "--leftovers", "--dry-run")[:2] == (0, left)
    assert run(capsys, "prune", tmp_path, "--leftovers")[:2] == (0, left)
    assert not (tmp_path / ".step-6.0123abcd.partial").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["what"],
        ["inspect"],
        ["diff", "a"],
        ["average", "a", "b"],
        ["average", "a", "--out", "b"],
        ["prune", "."],
        ["prune", ".", "--keep-last", "0"],
        ["prune", ".", "--keep-last", "x"],
    ],
)
def test_wrong_usage_has_status_2(arguments, capsys):
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("megablocks-ckpt")


def test_as_a_program_whose_reader_stops_early(tmp_path):
    ckpt.save(tmp_path / "c", {"long": list(range(50_000))})
    command = [
        sys.executable,
        "-m",
        "megablocks_core.ckpt.tools.command",
        "inspect",
        tmp_path / "c",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(20)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.slow
def test_memory_beside_the_largest_tensor_is_under_256_mb(tmp_path):
    """Three tensors of 256 MB; what is brought together whole may take one more of them."""
    tensors = {name: torch.arange(64 * 10**6, dtype=torch.float32) for name in "abc"}
    ckpt.save(tmp_path / "1", tensors)
    tensors["b"][7] += 1
    ckpt.save(tmp_path / "2", tensors)
    largest = tensors["a"].nbytes
    del tensors
    for arguments, limit in (
        (("diff", "1", "2"), 0),
        (("convert", "1", "dcp"), 0),
        (("diff", "1", "dcp"), 0),
        (("convert", "dcp", "3"), largest),
        (("average", "1", "2", "--out", "4"), largest),
    ):
        command = [sys.executable, "-c", _GROWTH, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert int(done.stdout.split()[-1]) < limit + 256 * 10**6, arguments


_GROWTH = """
import resource, sys
from megablocks_core.files import progress
from megablocks_core.ckpt.tools.command import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) < 2
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
