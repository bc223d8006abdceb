"""Every row of Megatron's weights goes to one place, and what does not fit is named."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megablocks_core.ckpt.tools.megatron_names import NO_WEIGHTS, Rows, Sizes, map_names

SIZES = Sizes("llama", 2, 4, 2, 3, 10, 0, is_tied=False)
TOP = {
    "embedding.word_embeddings.weight": (10, 8),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (10, 8),
}
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (8,),
    "self_attention.linear_qkv.weight": (24, 8),
    "self_attention.linear_proj.weight": (8, 12),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "mlp.linear_fc1.weight": (20, 8),
    "mlp.linear_fc2.weight": (8, 10),
}
MOE = {
    "pre_mlp_layernorm.weight": (8,),
    "mlp.router.weight": (3, 8),
    "mlp.experts.experts.linear_fc1.weight": (3, 14, 8),
    "mlp.experts.experts.linear_fc2.weight": (3, 8, 7),
}
DENSE_APART = {
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "mlp.linear_fc1.weight_w": (10, 8),
    "mlp.linear_fc1.weight_v": (10, 8),
    "mlp.linear_fc2.weight": (8, 10),
}
MOE_APART = {"pre_mlp_layernorm.weight": (8,), "mlp.router.weight": (3, 8)}
for _expert in range(3):
    MOE_APART |= {
        f"mlp.experts.experts.{_expert}.linear_fc1.weight_w": (7, 8),
        f"mlp.experts.experts.{_expert}.linear_fc1.weight_v": (7, 8),
        f"mlp.experts.experts.{_expert}.linear_fc2.weight": (8, 7),
    }


def stacked(*layers):
    inner = {key: shape for layer in layers for key, shape in layer.items()}
    return TOP | {f"decoder.layers.{key}": (2, *shape) for key, shape in inner.items()}


def separate(*layers):
    inner = {key: shape for layer in layers for key, shape in layer.items()}
    numbered = {
        f"decoder.layers.{layer}.{key}": shape for layer in (0, 1) for key, shape in inner.items()
    }
    return TOP | numbered


@pytest.mark.parametrize("keys", [stacked, separate])
@pytest.mark.parametrize(
    ("sizes", "layer"),
    [
        (SIZES, DENSE),
        (replace(SIZES, family="mixtral", experts=3), MOE),
        (SIZES, DENSE_APART),
        (replace(SIZES, family="mixtral", experts=3), MOE_APART),
    ],
)
def test_every_row_goes_to_one_place(keys, sizes, layer):
    shapes = keys(ATTENTION, layer)
    held = {key: torch.zeros(shape, dtype=torch.int64) for key, shape in shapes.items()}
    for source in map_names(shapes, sizes).values():
        assert source.shape[0] == sum(rows.stop - rows.start for rows in source.rows)
        for rows in source.rows:
            held[rows.key][rows.index][rows.start : rows.stop] += 1
    assert all((counts == 1).all() for counts in held.values())


def test_stacked_and_separate_layers_have_the_same_names():
    names = [map_names(keys(ATTENTION, DENSE), SIZES).keys() for keys in (stacked, separate)]
    assert names[0] == names[1]
    assert Counter(name.split(".")[2] for name in names[0] if "layers" in name) == {"0": 9, "1": 9}


def test_experts_gate_and_up_apart_have_the_same_names_and_shapes():
    sizes = replace(SIZES, family="qwen3_moe", experts=3)
    norms = {"self_attention.q_layernorm.weight": (3,), "self_attention.k_layernorm.weight": (3,)}
    for one, whole, apart in ((SIZES, DENSE, DENSE_APART), (sizes, MOE, MOE_APART)):
        more = norms if one is sizes else {}
        found = [map_names(separate(ATTENTION, more, layer), one) for layer in (whole, apart)]
        shapes = [{name: source.shape for name, source in each.items()} for each in found]
        assert shapes[0] == shapes[1]
    expert = found[1]["model.layers.1.mlp.experts.2.up_proj.weight"]
    key = "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight_v"
    assert expert.rows == [Rows(key, (), 0, 7)]


def test_an_expert_that_is_too_many_or_stands_twice_is_named():
    sizes = replace(SIZES, family="mixtral", experts=3)
    more = {"mlp.experts.experts.3.linear_fc2.weight": (8, 7)}
    with pytest.raises(ValueError, match=r"no such tensors: .*experts\.3\.w2"):
        map_names(separate(ATTENTION, MOE_APART, more), sizes)
    with pytest.raises(ValueError, match="is 'model.layers.0.mlp.gate_proj.weight', as is"):
        map_names(separate(ATTENTION, DENSE, DENSE_APART), SIZES)


def test_groups_of_queries_come_apart():
    found = map_names(stacked(ATTENTION, DENSE), SIZES)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    names = [f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert [found[name].rows for name in names] == [
        [Rows(key, (1,), 0, 6), Rows(key, (1,), 12, 18)],
        [Rows(key, (1,), 6, 9), Rows(key, (1,), 18, 21)],
        [Rows(key, (1,), 9, 12), Rows(key, (1,), 21, 24)],
    ]
    assert [found[name].shape for name in names] == [(12, 8), (6, 8), (6, 8)]


def test_padding_of_the_vocabulary_is_cut_off():
    shapes = {**stacked(ATTENTION, DENSE), "output_layer.weight": (16, 8)}
    assert map_names(shapes, SIZES)["lm_head.weight"].shape == (10, 8)


def test_tied_embeddings_and_biases():
    shapes = stacked(ATTENTION, DENSE, {"self_attention.linear_qkv.bias": (24,)})
    found = map_names(shapes, SIZES)
    assert found["model.layers.0.self_attn.k_proj.bias"].shape == (6,)
    del shapes["output_layer.weight"]
    assert "lm_head.weight" not in map_names(shapes, replace(SIZES, is_tied=True))


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"output_layer.weight": (9, 8)}, "llama", "10 rows or more"),
        ({"output_layer.weight": ()}, "llama", "10 rows or more"),
        ({"decoder.layers.self_attention.linear_qkv.weight": (2, 23, 8)}, "llama", "rows"),
        ({"decoder.layers.self_attention.linear_qkv.weight": (3, 24, 8)}, "llama", "2 layers"),
        ({"decoder.layers.self_attention.linear_qkv.weight": (2,)}, "llama", "too few dimensions"),
        ({"decoder.layers.mlp.linear_fc1.weight": (2, 19, 8)}, "llama", "gate and up"),
        ({"decoder.layers.mlp.linear_fc2.weight": None}, "llama", "2 tensors .* are missing"),
        ({"decoder.layers.input_layernorm.weight": (2, 8)}, "llama", ", as is '"),
        ({"decoder.layers.9.mlp.linear_fc2.weight": (8, 10)}, "llama", "no such tensors"),
        ({"decoder.layers.self_attention.q_layernorm.weight": (2, 3)}, "llama", "no such tensors"),
        ({"decoder.layers.mlp.router.weight": (2, 3, 8)}, "llama", "1 keys have no place"),
        ({}, "qwen2", "6 tensors of the model are missing"),
        ({}, "qwen3", "4 tensors of the model are missing"),
        ({}, "mixtral", "missing"),
    ],
)
def test_what_does_not_fit_is_named(changes, family, message):
    shapes = {**stacked(ATTENTION, DENSE), **changes}
    shapes = {key: shape for key, shape in shapes.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        map_names(shapes, replace(SIZES, family=family, experts=0))


def test_experts_are_counted():
    sizes = replace(SIZES, family="qwen3_moe", experts=4)
    with pytest.raises(ValueError, match="must have 4 experts"):
        map_names(stacked(ATTENTION, MOE), sizes)


def test_sizes_of_a_config():
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 12,
        "vocab_size": 10,
        "num_local_experts": 3,
    }
    assert Sizes.of(config) == Sizes("mixtral", 2, 4, 4, 3, 10, 3, is_tied=False)
    with pytest.raises(ValueError, match="model_type 'gpt2', which must be of"):
        Sizes.of({**config, "model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"config must have \['vocab_size'\]"):
        Sizes.of({**config, "vocab_size": None})


def test_keys_that_hold_no_weights():
    for key in (
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
        "chained_0.optimizer.state.fp32_param.output_layer.weight",
        "rng_state/shard_0_1",
        "common_state/shard_0_1",
        "rerun_state_machine_state/shard_0_1",
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2",
    ):
        assert NO_WEIGHTS.fullmatch(key)
    for key in (*TOP, "decoder.layers.mlp.optimizer.weight"):
        assert not NO_WEIGHTS.fullmatch(key)
