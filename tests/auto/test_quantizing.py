"""Folders and checkpoints are quantised to the bytes that their model is written as."""

import json
import signal

import pytest
import torch

from megablocks_core.auto.command import main
from megablocks_core.auto.quantizing import quantize_to_hf
from megablocks_core.export import save_hf, save_quantized_hf, verify
from megablocks_core.export.quantising import Int4, Int8
from megablocks_core.files import is_unfinished
from tests.auto.runs import save, trained
from tests.auto.test_drills import PROGRAM
from tests.export.quantising.tiny_recipes import RECIPES, calibrated, tiny


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer, and its calibration beside it."""
    path = tmp_path_factory.mktemp("source")
    save_hf(tiny(), path / "hf")
    (path / "hf" / "tokenizer.json").write_text("{}")
    calibrated(tiny().state_dict()).save(path / "calibration.json")
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_folder_becomes_what_its_model_is_written_as(folder, tmp_path, name):
    calibration, seen = calibrated(tiny().state_dict()), []
    quantize_to_hf(
        folder / "hf",
        tmp_path / "out",
        recipe=RECIPES[name],
        calibration=calibration,
        progress=lambda *found: seen.append(found),
    )
    save_quantized_hf(
        tiny(),
        tmp_path / "model",
        recipe=RECIPES[name],
        calibration=calibration,
        like=folder / "hf",
    )
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "model")
    assert "tokenizer.json" in bytes_of(tmp_path / "out")
    assert seen == sorted(seen, key=lambda one: one[0]) and seen[-1][0] == seen[-1][1]


def test_a_checkpoint_becomes_what_its_model_is_written_as(tmp_path):
    model, *rest = trained("mixtral", {}, dtype=torch.float32)
    save(tmp_path / "step-1", model, *rest)
    quantize_to_hf(tmp_path / "step-1", tmp_path / "out", recipe=Int8())
    save_quantized_hf(model, tmp_path / "model", recipe=Int8())
    ours, theirs = bytes_of(tmp_path / "out"), bytes_of(tmp_path / "model")
    assert ours.keys() == theirs.keys()
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    verify(tmp_path / "out", values=True)


@pytest.mark.drill
def test_a_run_that_is_killed_at_any_call_leaves_nothing_or_all(folder, tmp_path, launch):
    words = ("quantize", folder / "hf", "--recipe", "int8")
    quantize_to_hf(folder / "hf", tmp_path / "whole", recipe=Int8())
    whole, killed = bytes_of(tmp_path / "whole"), 0
    for call in range(1, 100):
        out = tmp_path / f"{call}" / "out"
        (process,) = launch("-c", PROGRAM, call, "before", *words[:2], out, *words[2:])
        _, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        killed += 1
        left = list(out.parent.iterdir()) if out.parent.exists() else []
        assert not out.exists() or bytes_of(out) == whole
        assert out.exists() or all(is_unfinished(path) for path in left)
    assert bytes_of(out) == whole and killed >= 3 * len(whole)


def said(capsys, *arguments):
    status = main(["quantize", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_the_command(folder, tmp_path, capsys):
    source, calibration = folder / "hf", folder / "calibration.json"
    for number, (name, *more) in enumerate(
        (
            ["fp8", "--calibration", calibration],
            ["nvfp4", "--calibration", calibration, "--no-kv-cache", "--dtype", "float16"],
            ["int4", "--group-size", 16, "--exclude", "*.o_proj", "--exclude", "*.down_proj"],
            ["fp8-blocks", "--max-file-size", "9kB"],
            ["int8"],
        )
    ):
        out = tmp_path / f"{number}"
        assert said(capsys, source, out, "--recipe", name, *more) == (0, [str(out)], [])
        assert main(["verify", str(out), "--values"]) == 0
        capsys.readouterr()
    scheme = json.loads((tmp_path / "1" / "config.json").read_text())["quantization_config"]
    assert "kv_cache_scheme" not in scheme and len(bytes_of(tmp_path / "3")) > 4
    recipe = Int4(group_size=16, exclude=("*.o_proj", "*.down_proj"))
    quantize_to_hf(source, tmp_path / "int4", recipe=recipe)
    assert bytes_of(tmp_path / "2") == bytes_of(tmp_path / "int4")


def test_wrong_usage_is_named_and_nothing_is_there(folder, tmp_path, capsys):
    out = tmp_path / "out"
    for arguments, message in (
        (["--recipe", "fp8"], "calibration=None must be one for Fp8"),
        (["--recipe", "int8", "--group-size", 3], "--recipe int8 has no ['group_size']"),
        (["--recipe", "int4", "--group-size", 0], "group_size=0"),
        (["--recipe", "int8", "--no-kv-cache"], "--recipe int8 has no ['kv_cache']"),
        (["--recipe", "fp8", "--calibration", tmp_path / "no"], "no is missing"),
        (["--recipe", "int8", "--entry", "average"], "entry must not be given"),
    ):
        status, _, (line,) = said(capsys, folder / "hf", out, *arguments)
        assert status == 2 and message in line
    with pytest.raises(ValueError, match="recipe=3 must be one"):
        quantize_to_hf(folder / "hf", out, recipe=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be new or"):
        quantize_to_hf(folder / "hf", folder, recipe=Int8())
    assert not out.exists()
