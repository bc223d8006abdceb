"""Folders and checkpoints become the TensorRT-LLM checkpoint that their model is written as."""

import json
import sys

import pytest
import torch

from megablocks_core.auto.command import main
from megablocks_core.auto.trtllm import to_trtllm
from megablocks_core.export import save_hf, save_trtllm, verify
from megablocks_core.export.quantising import Fp8
from tests.auto.runs import save, trained
from tests.export.quantising.tiny_recipes import calibrated, tiny


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder, and its calibration beside it."""
    path = tmp_path_factory.mktemp("source")
    save_hf(tiny(), path / "hf")
    calibrated(tiny().state_dict()).save(path / "calibration.json")
    return path


@pytest.mark.parametrize("recipe", [None, Fp8()])
def test_a_folder_becomes_what_its_model_is_written_as(folder, tmp_path, recipe):
    found = calibrated(tiny().state_dict()) if recipe else None
    seen, words = [], {"tp": 2, "pp": 2, "recipe": recipe, "calibration": found}
    to_trtllm(folder / "hf", tmp_path / "a", **words, progress=lambda *one: seen.append(one))
    save_trtllm(tiny(), tmp_path / "b", **words)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert seen == sorted(seen, key=lambda one: one[0]) and seen[-1][0] == seen[-1][1]


def test_a_checkpoint_becomes_what_its_model_is_written_as(tmp_path):
    model, *rest = trained("mixtral", {}, dtype=torch.float32)
    save(tmp_path / "step-1", model, *rest)
    to_trtllm(tmp_path / "step-1", tmp_path / "a", tp=2, moe_ep=2, dtype=torch.bfloat16)
    save_trtllm(model, tmp_path / "b", tp=2, moe_ep=2, dtype=torch.bfloat16)
    ours, theirs = bytes_of(tmp_path / "a"), bytes_of(tmp_path / "b")
    for file in ("rank0.safetensors", "rank1.safetensors"):
        assert ours[file] == theirs[file]
    verify(tmp_path / "a", values=True)


def said(capsys, *arguments):
    status = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_the_command(folder, tmp_path, capsys):
    source, out = folder / "hf", tmp_path / "out"
    more = ("--tp", 2, "--pp", 2, "--dtype", "float16")
    fp8 = ("--recipe", "fp8", "--calibration", folder / "calibration.json", "--no-kv-cache")
    status, lines, _ = said(capsys, "trtllm", source, out, *more, *fp8)
    assert (status, lines) == (0, [str(out)])
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float16" and config["mapping"]["world_size"] == 4
    assert config["quantization"]["quant_algo"] == "FP8"
    assert config["quantization"]["kv_cache_quant_algo"] is None
    assert said(capsys, "verify", out, "--values")[:2] == (0, [f"{out}: whole"])
    (out / "rank1.safetensors").unlink()
    status, _, errors = said(capsys, "verify", out)
    assert status == 1 and "rank1.safetensors is missing" in errors[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", 3], "tp=3 must divide heads"),
        (["--tp", 0], "tp=0 must be a whole number above 0"),
        (["--recipe", "fp8"], "calibration=None must be one"),
        (["--no-kv-cache"], "--no-kv-cache is for --recipe fp8"),
        (["--recipe", "int8", "--no-kv-cache"], "--recipe int8 has no ['kv_cache']"),
        (["--entry", "other"], "entry must not be given"),
    ],
)
def test_what_does_not_fit_is_said(folder, tmp_path, capsys, words, message):
    status, lines, errors = said(capsys, "trtllm", folder / "hf", tmp_path / "out", *words)
    assert (status, lines) == (2, []) and message in errors[-1]
    assert not list(tmp_path.iterdir())


def test_engines_need_their_package(folder, tmp_path, capsys, monkeypatch):
    assert said(capsys, "trtllm", folder / "hf", tmp_path / "in")[0] == 0
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    status, _, errors = said(capsys, "engine", tmp_path / "in", tmp_path / "out")
    assert status == 2 and "needs tensorrt_llm up to 1.2" in errors[-1]


def test_the_help_names_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "trtllm" in shown and "engine" in shown
