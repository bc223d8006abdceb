"""The command: what it prints, its exit status, and what it leaves."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megablocks_core.auto.command import main
from megablocks_core.files import progress
from tests.auto.runs import TOKENS, save, trained
from tests.export.tiny_models import pretrained
from tests.files.test_progress import Terminal


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training checkpoint, and the model in it."""
    folder = tmp_path_factory.mktemp("run")
    model, *rest = trained("mixtral", {}, dtype=torch.float32)
    save(folder / "step-1", model, *rest)
    return folder / "step-1", model


def said(capsys, *arguments):
    """(exit status, lines on stdout, lines on stderr)."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_hf_verify_and_diff(run, tmp_path, capsys):
    checkpoint, model = run
    for number in (1, 2):
        out = tmp_path / f"{number}"
        options = ["--max-file-size", "20kB"][: 2 * number - 2]
        assert said(capsys, "hf", checkpoint, out, *options) == (0, [str(out)], [])
    files = sorted(path.name for path in (tmp_path / "2").iterdir())
    assert len(files) > 4 and "model.safetensors.index.json" in files
    paths = [tmp_path / "1", tmp_path / "2"]
    assert said(capsys, "verify", *paths) == (0, [f"{path}: whole" for path in paths], [])
    assert said(capsys, "verify", *paths, "--values")[0] == 0
    assert said(capsys, "diff", *paths) == (0, [], [])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "2")
    with torch.no_grad():
        expected, logits = theirs(TOKENS).logits, model(TOKENS).logits
    assert (logits - expected).norm() <= 2e-6 * expected.norm()


def test_faults_have_status_1_and_trouble_2(run, tmp_path, capsys):
    out = tmp_path / "out"
    main(["hf", str(run[0]), str(out), "--dtype", "bfloat16"])
    status, _, (line,) = said(capsys, "hf", run[0], out)
    assert status == 2 and line.startswith("megablocks-export: ") and "must be new or" in line
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }
    main(["hf", str(run[0]), str(tmp_path / "average"), "--entry", "average"])
    capsys.readouterr()
    status, lines, _ = said(capsys, "diff", out, tmp_path / "average")
    assert status == 1 and "tensor lm_head.weight: dtype BF16 and F32" in lines
    status, _, (line,) = said(capsys, "diff", out, tmp_path / "none")
    assert status == 2 and "config.json is missing" in line
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors")
    status, lines, errors = said(capsys, "verify", out, tmp_path / "average")
    assert (status, lines) == (1, [f"{tmp_path}/average: whole"])
    assert len(errors) == 1 and f"{out}: " in errors[0] and "['lm_head.weight']" in errors[0]
    status, _, (line,) = said(capsys, "hf", tmp_path / "none", tmp_path / "more")
    assert status == 1 and "is no checkpoint" in line
    status, _, (line,) = said(capsys, "hf", run[0], tmp_path / "more", "--config", tmp_path / "no")
    assert status == 2 and "is missing" in line
    assert not (tmp_path / "more").exists()


def test_names_that_would_write_to_the_terminal_are_shown(tmp_path, capsys):
    """Of tensors, entries and files, in lines on stdout and in errors."""
    name = "model.\x1b[2J\nwhole\u202e"
    for folder, entry in (("a", "\x1b]0;title\x07"), ("b", "b")):
        (tmp_path / folder).mkdir()
        save_file({name + folder: torch.ones(2)}, tmp_path / folder / "model.safetensors")
        config = {"model_type": "none", entry: entry}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        (tmp_path / folder / f"\x1b[31m{folder}").touch()
    status, lines, _ = said(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert status == 1 and r"only in the first: tensor model.\x1b[2J\nwhole\u202ea" in lines
    assert r"only in the first: config.\x1b]0;title\x07" in lines
    assert r"only in the second: file \x1b[31mb" in lines and len(lines) == 6
    pretrained(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(2)}, file)
    capsys.readouterr()
    status, lines, (error,) = said(capsys, "verify", tmp_path / "c")
    assert (status, lines) == (1, []) and r"model.\x1b[2J\nwhole\u202e" in error


@pytest.mark.parametrize("arguments", [["hf"], ["verify", "--values"], ["diff"]])
def test_a_terminal_sees_how_far_it_is(run, tmp_path, monkeypatch, arguments):
    out = [str(tmp_path / name) for name in "ab"]
    for path in out:
        assert main(["hf", str(run[0]), path]) == 0
    places = [str(run[0]), str(tmp_path / "c")] if arguments == ["hf"] else out
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main([*arguments, *places]) == 0
    assert f"\r{arguments[0]}  " in terminal.getvalue()
    assert "####" in terminal.getvalue() and terminal.getvalue().endswith(" \r")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["what"],
        ["hf", "a"],
        ["verify"],
        ["diff", "a"],
        ["hf", "a", "b", "--dtype", "int8"],
        ["hf", "a", "b", "--max-file-size", "0"],
        ["hf", "a", "b", "--max-file-size", "5 apples"],
    ],
)
def test_wrong_usage_has_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("megablocks-export")


def test_as_a_program_that_ctrl_c_stops_it_leaves_nothing(run, tmp_path):
    """Stopped while it writes: a fault of the disk makes it wait there."""
    code = """
import sys, time
from megablocks_core.auto.command import main
from megablocks_core.files import disk
write, seen = disk.write, []
def slow(*arguments):
    seen.append(1)
    if len(seen) == 5:
        print("writing", flush=True)
        time.sleep(60)
    return write(*arguments)
disk.write = slow
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "hf", run[0], tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"writing\n"
        assert not (tmp_path / "out").exists()
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert (process.returncode, errors) == (130, b"megablocks-export: stopped\n")
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_there(run, tmp_path):
    program = os.path.join(os.path.dirname(sys.executable), "megablocks-export")
    done = subprocess.run(
        [program, "hf", run[0], tmp_path / "out"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/out\n"), done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mixtral"
