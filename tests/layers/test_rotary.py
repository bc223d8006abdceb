"""Rotary tables follow their formulas and transformers' scalings."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megablocks_core.layers.rotary import RotaryEmbedding, attention_factor, frequencies, rotate

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
]


def test_f_095_partial_rotary_takes_its_frequencies_from_the_turned_width():
    rotary = RotaryEmbedding(8, rotary_dim=4, base=10000.0)
    assert_close(frequencies(4, base=10000.0), torch.tensor([1.0, 0.01], dtype=torch.float64))
    x_TND = torch.randn(6, 2, 8, dtype=torch.float64)
    y_TND = rotate(x_TND, *rotary(torch.arange(6), dtype=torch.float64))

    expected = x_TND.clone()
    for token in range(6):
        for first, second, frequency in ((0, 2, 1.0), (1, 3, 0.01)):
            pair = torch.complex(x_TND[token, :, first], x_TND[token, :, second])
            turned = pair * torch.exp(torch.tensor(1j * token * frequency, dtype=torch.complex128))
            expected[token, :, first], expected[token, :, second] = turned.real, turned.imag
    assert_close(y_TND, expected, atol=1e-14, rtol=0)
    assert torch.equal(y_TND[..., 4:], x_TND[..., 4:])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(scaling):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=65536,
        rope_parameters={**scaling, "rope_theta": 500.0},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    ours = RotaryEmbedding(32, base=500.0, scaling=scaling)
    assert_close(frequencies(32, base=500.0, scaling=ours.scaling).float(), expected)
    assert attention_factor(ours.scaling) == pytest.approx(factor)
    cos_Tr, _ = ours(torch.zeros(1, dtype=torch.int64))
    assert_close(cos_Tr, torch.full((1, 16), float(factor)))


def test_pairs_are_those_of_transformers():
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    cos_Tr, sin_Tr = RotaryEmbedding(8)(torch.arange(5))
    cos, sin = (torch.cat([table, table], -1)[None] for table in (cos_Tr, sin_Tr))
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    assert_close((rotate(q, cos_Tr, sin_Tr), rotate(k, cos_Tr, sin_Tr)), expected)


def test_tables_are_wide_and_right_at_far_positions():
    rotary = RotaryEmbedding(4, base=100.0)
    position = torch.tensor([10_000_019])
    cos_Tr, _ = rotary(position, dtype=torch.bfloat16)
    assert cos_Tr.dtype == torch.float32
    angles = position.double() * torch.tensor([1.0, 0.1], dtype=torch.float64)
    assert_close(cos_Tr[0], angles.cos().float())
    assert rotary(position, dtype=torch.float64)[0].dtype == torch.float64
    x = torch.randn(1, 1, 4).bfloat16()
    assert rotate(x, *rotary(position)).dtype == torch.bfloat16


def test_positions_of_each_row_are_served():
    rotary, x_BTND = RotaryEmbedding(4), torch.randn(2, 3, 1, 4)
    positions_BT = torch.tensor([[0, 1, 2], [5, 6, 7]])
    y_BTND = rotate(x_BTND, *rotary(positions_BT))
    for row in range(2):
        assert_close(y_BTND[row], rotate(x_BTND[row], *rotary(positions_BT[row])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim=3"),
        ({"rotary_dim": 10}, "rotary_dim=10"),
        ({"scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"scaling": {"rope_type": "linear"}}, r"\['factor'\]"),
        ({"scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, r"\['beta_fast'\]"),
    ],
)
def test_bad_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(8, **arguments)


def test_rotary_has_no_state_and_compiles():
    rotary = RotaryEmbedding(8, scaling=SCALINGS[1])
    assert not rotary.state_dict() and not list(rotary.buffers())
    x_TND, positions = torch.randn(4, 2, 8), torch.arange(4)
    compiled = torch.compile(
        lambda x, positions: rotate(x, *rotary(positions)), fullgraph=True, backend="aot_eager"
    )
    assert_close(compiled(x_TND, positions), rotate(x_TND, *rotary(positions)))
