"""A block adds attention and a feed-forward layer to its input; a mixture gives its routing too."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from megablocks_core.layers import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryEmbedding
from megablocks_core.layers.moe import GroupedExperts, LocalDispatcher, MoE, Routing, TopKRouter

H = 16


def feed_forward(kind):
    if kind == "dense":
        return GatedMLP(H, 24)
    return MoE(
        router=TopKRouter(H, num_experts=4, top_k=2),
        dispatcher=LocalDispatcher(),
        experts=GroupedExperts(4, H, 8),
    )


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_block_is_two_residual_steps(kind):
    attention = Attention(H, 2, num_kv_heads=2, head_dim=8, rotary=RotaryEmbedding(8))
    block = DecoderLayer(
        H, attention=attention, feed_forward=feed_forward(kind), norm=partial(RMSNorm, eps=1e-5)
    )
    x, positions = torch.randn(2, 5, H), torch.arange(5)
    middle = x + attention(block.input_layernorm(x), positions=positions)
    inner = block.mlp(block.post_attention_layernorm(middle))
    output = block(x, positions=positions)
    if kind == "mixture":
        (inner, own_routing), (output, routing) = inner, output
        assert isinstance(routing, Routing)
        assert torch.equal(routing.indices, own_routing.indices)
    assert_close(output, middle + inner)


def test_a_mask_reaches_the_mixture():
    attention = Attention(H, 2, num_kv_heads=2, head_dim=8, rotary=RotaryEmbedding(8))
    block = DecoderLayer(H, attention=attention, feed_forward=feed_forward("mixture"), norm=RMSNorm)
    mask = torch.tensor([True, False, True])
    _, routing = block(torch.randn(3, H), positions=torch.arange(3), mask=mask)
    assert (routing.indices[:, 0] >= 0).tolist() == mask.tolist()
