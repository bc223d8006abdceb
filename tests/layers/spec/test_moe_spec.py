"""Which layers are sparse, and what configs can say of their experts."""

import pytest

from megablocks_core.layers import MoESpec
from megablocks_core.layers.spec.entries import Entries
from megablocks_core.layers.spec.moe_spec import read_moe, write_moe


def test_sparse_layers_are_every_so_many_but_those_named():
    spec = MoESpec(4, 2, 8, sparse_step=2, dense_layers=[3])
    assert [layer for layer in range(8) if spec.is_sparse(layer)] == [1, 5, 7]
    assert hash(spec) == hash(MoESpec(4, 2, 8, sparse_step=2, dense_layers=(3,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 5}, "top_k=5 must not be above num_experts=4"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"ffn_size": 0}, "ffn_size=0"),
        ({"sparse_step": 0}, "sparse_step=0"),
        ({"score": "relu"}, "score='relu' must be one of softmax, sigmoid"),
        ({"dense_layers": (0, -1)}, r"dense_layers=\(0, -1\) must be counted from 0"),
        ({"shared_gate": True}, "shared_ffn_size=0 must be at least 1"),
        ({"shared_ffn_size": -1}, "shared_ffn_size=-1"),
    ],
)
def test_what_makes_no_sense_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        MoESpec(**{"num_experts": 4, "top_k": 2, "ffn_size": 8, **fields})


def test_both_names_of_the_number_of_experts_are_read():
    """transformers 5 writes ``num_local_experts`` for Qwen3-MoE; older files have the other."""
    others = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for name in ("num_experts", "num_local_experts"):
        assert read_moe(Entries({name: 4, **others}), "qwen3_moe", 9).num_experts == 4
    assert read_moe(Entries({}), "llama", 9) is None


@pytest.mark.parametrize(
    ("family", "moe"),
    [
        ("mixtral", MoESpec(4, 2, 8)),
        ("mixtral", MoESpec(4, 2, 9, renormalize=False)),
        ("olmoe", MoESpec(4, 2, 9, sparse_step=2)),
        ("qwen3_moe", MoESpec(4, 2, 8, score="sigmoid")),
        ("qwen3_moe", MoESpec(4, 2, 8, shared_ffn_size=8)),
        ("qwen2_moe", MoESpec(4, 2, 8, shared_ffn_size=8)),
        ("qwen2_moe", MoESpec(4, 2, 8)),
    ],
)
def test_features_that_a_family_cannot_name_are_not_written(family, moe):
    with pytest.raises(ValueError, match=f"in a config of '{family}'"):
        write_moe(moe, family, 9)
