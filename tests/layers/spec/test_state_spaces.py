"""Configs of Mamba's authors are read and written without losing a feature."""

from typing import Any

import pytest

from megablocks_core.layers import DecoderSpec, Mamba1Spec, Mamba2Spec

PUBLISHED: dict[str, Any] = {
    "d_model": 32,
    "n_layer": 3,
    "vocab_size": 50,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
SECOND = {
    **PUBLISHED,
    "d_intermediate": 0,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8, "ngroups": 2},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": False,
}


def test_the_first_kind():
    spec = DecoderSpec.from_hf(PUBLISHED)
    assert spec.mamba == Mamba1Spec(inner_size=64, state_size=16, dt_rank=2)
    assert (spec.vocab_size, spec.pattern, spec.tied) == (56, "MMM", True)
    assert spec.float32_residual


def test_the_second_kind():
    spec = DecoderSpec.from_hf(SECOND)
    assert spec.mamba == Mamba2Spec(8, 8, 16, num_groups=2, chunk_size=256)
    assert (spec.vocab_size, spec.tied) == (64, False)


@pytest.mark.parametrize("config", [PUBLISHED, SECOND], ids=["Mamba1", "Mamba2"])
def test_what_is_written_reads_alike(config):
    spec = DecoderSpec.from_hf(config)
    written = spec.to_hf()
    assert "model_type" not in written
    assert DecoderSpec.from_hf(written) == spec


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rms_norm": False}, "rms_norm"),
        ({"d_intermediate": 64}, "d_intermediate"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "Mamba3"),
        ({"ssm_cfg": {"D_has_hdim": True}}, "D_has_hdim"),
        ({"mystery": 1}, "mystery"),
    ],
)
def test_what_a_decoder_does_not_have_is_named(change, name):
    with pytest.raises(ValueError, match=name):
        DecoderSpec.from_hf({**PUBLISHED, **change})
