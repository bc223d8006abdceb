"""Engines are built of each rank by what is installed; it is asked in the words of its API.

TensorRT-LLM needs a GPU: here a module with its functions stands in for it, and nothing is built.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megablocks_core.export import build_and_save_engine, save_hf, save_trtllm
from tests.export.tiny_models import tiny_model


def installed(monkeypatch, version, calls):
    """A stand-in that notes what it is asked for."""
    library, models = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.models")

    class Llama:
        @classmethod
        def from_checkpoint(cls, path, rank):
            return path, rank

    def build(model, config):
        return SimpleNamespace(save=lambda out: calls.append((model, config, out)))

    library.__dict__.update(__version__=version, build=build, BuildConfig=lambda **more: more)
    models.__dict__.update(MODEL_MAP={"LlamaForCausalLM": Llama})
    monkeypatch.setitem(sys.modules, "tensorrt_llm", library)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.models", models)


@pytest.fixture
def checkpoint(tmp_path):
    save_trtllm(tiny_model(dtype=torch.bfloat16), tmp_path / "in", tp=2)
    return tmp_path / "in"


def test_each_rank_is_built(tmp_path, checkpoint, monkeypatch):
    calls = []
    installed(monkeypatch, "1.2.1", calls)
    build_and_save_engine(checkpoint, tmp_path / "out", max_batch_size=3, max_num_tokens=100)
    limits = {
        "max_batch_size": 3,
        "max_input_len": 1024,
        "max_seq_len": 2048,
        "max_num_tokens": 100,
        "max_beam_width": 1,
    }
    assert calls == [((str(checkpoint), r), limits, str(tmp_path / "out")) for r in range(2)]


def test_without_the_package_or_with_one_that_has_no_engines(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ImportError, match="needs tensorrt_llm up to 1.2"):
        build_and_save_engine(checkpoint, tmp_path / "out")
    for version in ("1.3.0rc2", "2.0", "unknown"):
        installed(monkeypatch, version, [])
        with pytest.raises(ImportError, match=f"tensorrt_llm {version} has no engines"):
            build_and_save_engine(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_is_said_before_anything_is_built(tmp_path, checkpoint, monkeypatch):
    calls = []
    installed(monkeypatch, "1.0.0", calls)
    with pytest.raises(ValueError, match="max_batch_size=0 must be a whole number"):
        build_and_save_engine(checkpoint, tmp_path / "out", max_batch_size=0)
    with pytest.raises(ValueError, match="max_input_len=9 must be at most max_seq_len=8"):
        build_and_save_engine(checkpoint, tmp_path / "out", max_input_len=9, max_seq_len=8)
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        build_and_save_engine(checkpoint, checkpoint)
    save_hf(tiny_model(), tmp_path / "hf")
    with pytest.raises(ValueError, match="hf' must be one of TensorRT-LLM"):
        build_and_save_engine(tmp_path / "hf", tmp_path / "out")
    (checkpoint / "rank1.safetensors").unlink()
    with pytest.raises(ValueError, match="rank1.safetensors is missing"):
        build_and_save_engine(checkpoint, tmp_path / "out")
    assert not calls
