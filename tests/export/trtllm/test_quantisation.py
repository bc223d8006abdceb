"""A recipe takes weights of a model, and its calibration must know them."""

import pytest
import torch

from megablocks_core.export import save_trtllm
from megablocks_core.export.quantising.calibration import Calibration
from megablocks_core.export.quantising.recipe import Fp8, Int8
from megablocks_core.export.trtllm.model import model_of
from megablocks_core.export.trtllm.quantisation import cached_of, check_recipe
from tests.export.tiny_models import tiny_model
from tests.export.trtllm.plain import MAMBA2
from tests.export.trtllm.test_saving import calibrated

KEY = "model.layers.0.self_attn.k_proj.weight"


def test_cached_keys_and_values():
    names = [KEY, KEY.replace("k_proj", "v_proj"), KEY.replace("k_proj", "q_proj")]
    assert cached_of(names) == (names[:1], names[1:2])


def test_mamba_2_is_not_quantised():
    model = model_of({**MAMBA2, "model_type": "mamba2"})
    with pytest.raises(ValueError, match="must be None for mamba2"):
        check_recipe(Int8(), None, model)
    check_recipe(None, None, model)


@pytest.mark.parametrize("kind", ["inputs", "keys", "values"])
@pytest.mark.parametrize("value", [None, 0.0])
def test_magnitudes_that_are_missing_or_nothing(tmp_path, kind, value):
    model = tiny_model(dtype=torch.bfloat16)
    whole = calibrated(model.state_dict())
    parts = {name: dict(getattr(whole, name)) for name in ("inputs", "keys", "values")}
    name = KEY.replace("k_proj", "v_proj") if kind == "values" else KEY
    if value is None:
        del parts[kind][name]
    else:
        parts[kind][name] = value
    rule = f"must have {name}" if value is None else "must be above 0 and finite"
    with pytest.raises(ValueError, match=rf"calibration.{kind}.* {rule}"):
        save_trtllm(model, tmp_path / "out", recipe=Fp8(), calibration=Calibration(**parts))
    if kind != "inputs":
        plain = Fp8(kv_cache=False)
        save_trtllm(model, tmp_path / "out", recipe=plain, calibration=Calibration(**parts))


def test_a_recipe_that_takes_nothing(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    found = calibrated(model.state_dict())
    with pytest.raises(ValueError, match="must take a weight of the model, but takes none"):
        save_trtllm(model, tmp_path / "out", recipe=Fp8(exclude=("*",)), calibration=found)
    with pytest.raises(ValueError, match="recipe must take all of .*q_proj.* or none"):
        save_trtllm(model, tmp_path / "out", recipe=Fp8(exclude=("*.q_proj",)), calibration=found)
