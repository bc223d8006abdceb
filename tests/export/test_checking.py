"""A folder of each kind is checked as what its config says that it is."""

import pytest

from megablocks_core.export import save_hf, save_quantized_hf, verify
from megablocks_core.export.quantising import Int8
from tests.export.quantised_folders import edit_config
from tests.export.quantising.tiny_recipes import tiny


def test_plain_and_quantised_folders(tmp_path):
    save_hf(tiny(), tmp_path / "plain")
    save_quantized_hf(tiny(), tmp_path / "int8", recipe=Int8())
    seen = []
    for name in ("plain", "int8"):
        verify(tmp_path / name, values=True, progress=lambda *found: seen.append((name, *found)))  # noqa: B023
        assert seen[-1][0] == name and seen[-1][1] == seen[-1][2] > 0
    said = (tmp_path / "int8" / "hf_quant_config.json").read_text()
    (tmp_path / "plain" / "hf_quant_config.json").write_text(said)
    with pytest.raises(ValueError, match=r"q_proj.weight_scale.* missing|missing .*weight_scale"):
        verify(tmp_path / "plain")
    (tmp_path / "int8" / "hf_quant_config.json").unlink()
    edit_config(tmp_path / "int8", quantization_config=None)
    with pytest.raises(ValueError, match="not described .*weight_scale"):
        verify(tmp_path / "int8")


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        verify(tmp_path)
