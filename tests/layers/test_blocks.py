"""Blocks are built as the spec says, and its scales reach every part of a model."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers import Attention, Decoder, DecoderSpec
from megablocks_core.parallel import reset_parameters

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "ffn_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}
TOKENS = torch.arange(12).view(2, 6) * 3


def _decoder(**fields: Any) -> Decoder:
    decoder = Decoder(DecoderSpec(**SIZES, **fields), dtype=torch.float64)
    reset_parameters(decoder, seed=1)
    return decoder


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_scales_are_those_of_scaled_weights(factor: float):
    scaled = _decoder(embedding_scale=factor, residual_scale=factor, logits_divisor=1 / factor)
    plain = _decoder()
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain.model.embed_tokens.weight.mul_(factor)
        plain.model.norm.weight.mul_(factor)
        for name, parameter in plain.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(factor)
    assert_close(scaled(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=1e-12)


def test_the_scale_of_attention_is_that_of_scaled_queries():
    scaled, plain = _decoder(attention_scale=0.2), _decoder()
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        for part in plain.modules():
            if isinstance(part, Attention):
                part.q_proj.weight.mul_(0.2 * part.head_dim**0.5)
    assert_close(scaled(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=1e-12)


def test_without_rope_positions_change_nothing():
    decoder, other = _decoder(rope=False), TOKENS[0] * 0 + 7
    assert decoder.rotary is None
    assert torch.equal(decoder(TOKENS, positions=other).logits, decoder(TOKENS).logits)
    turned = _decoder(rotary_dim=2)
    turned.load_state_dict(decoder.state_dict())
    assert not torch.equal(turned(TOKENS).logits, decoder(TOKENS).logits)


def test_feed_forward_layers_need_no_gate():
    decoder = _decoder(gated_mlp=False, activation="relu2")
    assert "model.layers.0.mlp.gate_proj.weight" not in decoder.state_dict()
    decoder(TOKENS).logits.sum().backward()
