"""ModelOpt's calibration finds the same numbers, of its modules and its cache.

It needs the environment of ``tools/oracles.sh modelopt``.
"""

import pytest
import torch

from megablocks_core.auto import decoder_from_hf
from megablocks_core.export import calibrate
from megablocks_core.export.quantising import Fp8
from tests.export.tiny_models import TOKENS

pytest.importorskip("modelopt.torch.quantization", reason="oracle modelopt")

from tests.export.quantising.test_modelopt import models, theirs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_model_is_calibrated_to_the_same_numbers(tmp_path, family, dtype):
    model = models(family, dtype)
    expected = theirs(model, "fp8-cache", tmp_path / "theirs")
    found = calibrate(model, [TOKENS[:1], TOKENS[1:]], recipe=Fp8())
    ours = {name: value for name, value in expected.inputs.items() if name in found.inputs}
    near = {"rel": 1e-6 if dtype == torch.float32 else 2**-8}  # rows by row, or both at once
    assert found.inputs == pytest.approx(ours, **near)
    assert found.keys == pytest.approx(expected.keys, **near)
    assert found.values == pytest.approx(expected.values, **near)
    assert len(found.keys) == len(found.values) == 2 and len(found.inputs) == 14


def test_a_decoder_is_calibrated_to_the_same_numbers(tmp_path):
    model = models("qwen3", torch.float32)
    expected = theirs(model, "fp8-cache", tmp_path / "theirs")
    model.save_pretrained(tmp_path / "plain")
    found = calibrate(decoder_from_hf(tmp_path / "plain"), [TOKENS], recipe=Fp8())
    assert {*found.inputs} <= {*expected.inputs}
    for kind in ("inputs", "keys", "values"):
        for name, value in getattr(found, kind).items():
            assert value == pytest.approx(getattr(expected, kind)[name], rel=1e-5), name
