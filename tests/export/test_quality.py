"""What a server computes of a quantised model is near what it computes of a bfloat16 one.

The model is trained for some steps, so that logits mean something; a folder is read by a plain
loader, which rounds activations and cached keys and values too. The bounds stand in docs/export.md.
"""

import io
import json
import tokenize
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megablocks_core import layers
from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import calibrate, save_hf, save_quantized_hf, save_trtllm, verify
from megablocks_core.export.quantising import Fp8, Fp8Blocks, Int4, Int8, Nvfp4
from tests.export.plain_loader import dequantised, rounding
from tests.export.references import tiny
from tests.export.trtllm_loader import dequantised_trtllm

RECIPES = {
    "fp8": Fp8(),
    "fp8-blocks": Fp8Blocks(),
    "nvfp4": Nvfp4(),
    "int8": Int8(),
    "int4": Int4(group_size=32),
}
# Of logits by norm, over that of what varies in them, and of the loss in nats.
BOUNDS = {
    "fp8": (0.06, 0.015),
    "fp8-blocks": (0.02, 0.006),
    "nvfp4": (0.15, 0.05),
    "int8": (0.004, 0.002),
    "int4": (0.05, 0.01),
}
LENGTH = 64


def _text():
    """Bytes of the standard library [N LENGTH]."""
    text = b"".join(Path(module.__file__).read_bytes() for module in (tokenize, io, pytest))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in bfloat16, its logits of some text, and what calibration found of other text."""
    torch.manual_seed(0)
    spec = layers.gpt(vocab_size=256, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2)
    model, text = layers.Decoder(spec), _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        rows = text[torch.randint(len(text) - 16, (16,))]
        loss = _loss(model(rows).logits, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 3.0
    folder = tmp_path_factory.mktemp("quality") / "bf16"
    save_hf(model, folder, dtype=torch.bfloat16)
    model = decoder_from_hf(folder, dtype=torch.float32)
    calibration = calibrate(model, text[:64].split(16), recipe=Fp8())
    with torch.no_grad():
        logits = model(text[-16:]).logits
    return folder, text[-16:], logits, calibration


def _loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _varied(logits):
    """Logits without what they are in the mean over all places, which says nothing of a text."""
    return logits - logits.mean((0, 1))


@pytest.mark.parametrize("name", RECIPES)
def test_logits_of_quantised_folders_are_near_those_of_bfloat16(trained, tmp_path, name):
    folder, tokens, expected, calibration = trained
    model = decoder_from_hf(folder)
    save_quantized_hf(
        model, tmp_path / "out", recipe=RECIPES[name], calibration=calibration, like=folder
    )
    verify(tmp_path / "out", values=True)
    method, scales = dequantised(tmp_path / "out", tmp_path / "plain")
    again = decoder_from_hf(tmp_path / "plain")
    if RECIPES[name].is_calibrated:
        assert rounding(again, method, scales) == len(calibration.inputs) + 3
    _assert_near(name, again, tokens, expected)


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"tp": 4}], ids=str)
def test_logits_of_trtllm_checkpoints_are_those_of_bfloat16_or_near_them(trained, tmp_path, sizes):
    folder, tokens, expected, calibration = trained
    model, config = decoder_from_hf(folder), json.loads((folder / "config.json").read_text())
    save_trtllm(model, tmp_path / "bf16", **sizes)
    save_trtllm(model, tmp_path / "fp8", **sizes, recipe=Fp8(), calibration=calibration)
    for name in ("bf16", "fp8"):
        verify(tmp_path / name, values=True)
        scales = dequantised_trtllm(tmp_path / name, config, tmp_path / f"{name}-plain")
        again = decoder_from_hf(tmp_path / f"{name}-plain")
        if name == "bf16":
            assert not scales
            with torch.no_grad():
                assert torch.equal(again(tokens).logits, expected)
        else:
            assert rounding(again, "FP8", scales) == len(calibration.inputs) + 3
            _assert_near("fp8", again, tokens, expected)


@pytest.mark.filterwarnings("ignore:no token, or zeros alone")
def test_mixtures_are_read_by_the_plain_loaders_too(tmp_path):
    """Of random weights, which say less: an error of logits below 15%, by weights alone."""
    tiny("mixtral", torch.bfloat16).save_pretrained(tmp_path / "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    model = decoder_from_hf(tmp_path / "bf16", dtype=torch.float32)
    tokens = torch.arange(48).view(3, 16)
    calibration = calibrate(model, [tokens], recipe=Fp8())
    with torch.no_grad():
        expected = model(tokens).logits
    model = decoder_from_hf(tmp_path / "bf16")
    sizes = {"tp": 4, "moe_tp": 2, "moe_ep": 2}
    save_trtllm(model, tmp_path / "trtllm", **sizes)
    assert not dequantised_trtllm(tmp_path / "trtllm", config, tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(decoder_from_hf(tmp_path / "again")(tokens).logits, expected)
    fp8 = {"recipe": Fp8(), "calibration": calibration}
    save_trtllm(model, tmp_path / "trtllm-fp8", **sizes, **fp8)
    assert dequantised_trtllm(tmp_path / "trtllm-fp8", config, tmp_path / "again-fp8")
    for name, words in (("fp8", fp8), ("int8", {"recipe": Int8()})):
        save_quantized_hf(model, tmp_path / name, **words)
        verify(tmp_path / name, values=True)
        dequantised(tmp_path / name, tmp_path / f"{name}-plain")
    for name in ("again-fp8", "fp8-plain", "int8-plain"):
        with torch.no_grad():
            logits = decoder_from_hf(tmp_path / name)(tokens).logits
        error = float((logits - expected).norm() / expected.norm())
        print(f"{name}: {error:.4f}")
        assert 0 < error < 0.15, name


@torch.no_grad()
def _assert_near(name, model, tokens, expected):
    logits = model(tokens).logits
    error = float((logits - expected).norm() / _varied(expected).norm())
    worse = float(_loss(logits, tokens) - _loss(expected, tokens))
    print(f"{name}: {error:.4f} of logits, {worse:+.4f} of the loss")
    most, most_of_loss = BOUNDS[name]
    assert most / 10 < error < most and abs(worse) < most_of_loss
