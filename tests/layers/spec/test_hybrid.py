"""A spec's pattern, sizes and specs of blocks agree, or what disagrees is named."""

from typing import Any

import pytest

from megablocks_core.layers import DecoderSpec, DeltaSpec, Mamba1Spec, Mamba2Spec, MoESpec

MAMBA = Mamba2Spec(4, 4, 8)
DELTA = DeltaSpec(2, 4, 4, 4)
MOE = MoESpec(4, 2, 8)
PLAIN: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "ffn_size": 16,
    "num_layers": 5,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
}
HYBRID = {**PLAIN, "pattern": "M*-|EG", "mamba": MAMBA, "delta": DELTA, "moe": MOE}
NO_ATTENTION = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0}


def test_sizes_that_no_block_has_are_zero():
    DecoderSpec(**HYBRID)
    spec = {**PLAIN, **NO_ATTENTION, "ffn_size": 0, "pattern": "MMMMM"}
    DecoderSpec(**spec, mamba=Mamba1Spec(16, 4, 2))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_layers": 6}, "num_layers"),
        ({"pattern": "M*-|EX"}, "pattern"),
        ({"pattern": "M*-|EM"}, "delta"),
        ({"pattern": "M*-|MG"}, "moe"),
        ({"pattern": "G*-|EG"}, "mamba"),
        ({"pattern": "M--|EG"}, "num_heads"),
        ({"pattern": "M**|EG"}, "ffn_size"),
        ({"ffn_size": 0}, "ffn_size"),
        ({"ffn_size": 24.0}, "ffn_size"),
        ({"vocab_size": "50"}, "vocab_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"mamba": None}, "mamba"),
        ({"delta": None}, "delta"),
        ({"moe": None}, "moe"),
        ({"moe": MoESpec(4, 2, 8, sparse_step=2)}, "moe"),
        ({"moe": MoESpec(4, 2, 8, dense_layers=(1,))}, "moe"),
        ({"pattern": None, "delta": None, "moe": None}, "pattern"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": 5}, "rotary_dim"),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"residual_scale": -1.0}, "residual_scale"),
        ({"logits_divisor": 0.0}, "logits_divisor"),
    ],
)
def test_what_does_not_agree_is_named(changes: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=f"^{name}="):
        DecoderSpec(**{**HYBRID, **changes})


@pytest.mark.parametrize(
    "field",
    [
        {"gated_mlp": False},
        {"rope": False},
        {"rotary_dim": 2},
        {"attention_scale": 0.1},
        {"embedding_scale": 2.0},
        {"residual_scale": 2.0},
        {"logits_divisor": 2.0},
        {"float32_residual": True},
    ],
    ids=str,
)
def test_a_config_of_a_plain_family_names_no_such_feature(field: dict[str, Any]):
    with pytest.raises(ValueError, match=f"^{next(iter(field))}=.*llama"):
        DecoderSpec(**PLAIN, **field).to_hf()
