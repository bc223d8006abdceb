"""Attention equals one process at any size, with the traffic it promises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import Mesh, ShardSpec, gather_from, gather_whole, marks
from megablocks_core.layers import Attention, RMSNorm, RotaryEmbedding, on_part
from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.parallel import reset_parameters
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.traffic import Traffic

CU_SEQLENS = torch.tensor([0, 3, 4, 7])
CASES = {
    "one row": {"positions": torch.arange(8)},
    "documents and a tail": {
        "positions": torch.tensor([0, 1, 2, 0, 0, 1, 2, 0]),
        "cu_seqlens": CU_SEQLENS,
        "max_seqlen": 3,
    },
}


@ranks(1, 2, 4)
def test_every_number_of_kv_heads_equals_one_process():
    tp = _tp()
    for num_kv_heads in (4, 2, 1):
        for inputs in CASES.values():
            assert_parallel_equivalence(
                lambda group, num_kv_heads=num_kv_heads: _attention(group, num_kv_heads),
                {"x_TH": torch.randn(1, 8, 16), **inputs},
                group=tp,
                loss=_loss,
                same_start=True,
            )


@ranks(1, 2, 4)
def test_norms_over_whole_projections_and_clipping_equal_one_process():
    for num_kv_heads in (4, 1):
        assert_parallel_equivalence(
            lambda group, num_kv_heads=num_kv_heads: _attention(
                group, num_kv_heads, norm=None, projection_norm_eps=1e-3, clip=0.5
            ),
            {"x_TH": torch.randn(1, 8, 16), **CASES["one row"]},
            group=_tp(),
            loss=_loss,
            same_start=True,
        )


@ranks(1, 2, 4)
def test_gates_equal_one_process():
    for num_kv_heads in (4, 1):
        for options in ({}, {"norm": None, "projection_norm_eps": 1e-3}):
            assert_parallel_equivalence(
                lambda group, num_kv_heads=num_kv_heads, options=options: _attention(
                    group, num_kv_heads, gated=True, **options
                ),
                {"x_TH": torch.randn(1, 8, 16), **CASES["one row"]},
                group=_tp(),
                loss=_loss,
                same_start=True,
            )


@ranks(1, 2, 4)
def test_sinks_windows_and_caps_equal_one_process():
    tp = _tp()
    for num_kv_heads, options in (
        (4, {"sinks": True}),
        (1, {"sinks": True, "window": (2, None), "soft_cap": 3.0}),
        (2, {"sinks": True, "window": (1, 0), "sequence_parallel": True}),
    ):
        inputs = {"x_TH": torch.randn(1, 8, 16), **CASES["documents and a tail"]}
        cut = options.get("sequence_parallel", False)
        assert_parallel_equivalence(
            lambda group, num_kv_heads=num_kv_heads, options=options: _sunk(
                group, num_kv_heads, **options
            ),
            inputs,
            group=tp,
            loss=_loss,
            split=(lambda inputs: _own_tokens(inputs, tp)) if cut else None,
            join=(lambda y_TH: gather_from(y_TH, dim=-2, group=tp)) if cut else None,
        )


@ranks(2)
def test_sinks_are_cut_with_the_heads_and_start_at_zero():
    tp = _tp()
    layer = _attention(tp, sinks=True)
    assert layer.sinks is not None
    (specs,) = (specs for name, _, specs in marks(layer) if name == "sinks")
    assert specs == (ShardSpec(0, tp),)
    assert torch.equal(layer.sinks, torch.zeros(2))
    with torch.no_grad():
        layer.sinks.copy_(torch.tensor([1.0, 2.0]) + 2 * tp.rank)
    assert gather_whole(layer)["sinks"].tolist() == [1, 2, 3, 4]
    reset_parameters(layer, seed=0)
    assert not layer.sinks.any()
    assert "sinks" not in dict(_attention(tp).named_parameters())


def _sunk(group, num_kv_heads, **options):
    """A layer whose sinks differ."""
    layer = _attention(group, num_kv_heads, **options)
    with torch.no_grad():
        layer.sinks.copy_(torch.linspace(-1, 2, 4)[layer.heads])
    return layer


def _own_tokens(inputs, tp):
    return {**inputs, "x_TH": inputs["x_TH"].chunk(tp.size, dim=-2)[tp.rank]}


@ranks(1, 2, 4)
def test_cut_tokens_equal_one_process():
    tp = _tp()
    for num_kv_heads in (4, 1):
        for inputs in CASES.values():
            assert_parallel_equivalence(
                lambda group, num_kv_heads=num_kv_heads: _attention(
                    group, num_kv_heads, sequence_parallel=True
                ),
                {"x_TH": torch.randn(8, 16), **inputs},
                group=tp,
                loss=_loss,
                split=lambda inputs: {
                    **inputs,
                    "x_TH": inputs["x_TH"].chunk(tp.size, dim=-2)[tp.rank],
                },
                join=lambda y_TH: gather_from(y_TH, dim=-2, group=tp),
                same_start=True,
            )


@ranks(2)
def test_traffic_is_one_message_each_way_and_one_for_shared_weights():
    tp = _tp()
    plain = {"num_kv_heads": 2, "norm": None, "bias": False}
    for options, forward, backward in (
        (plain, {"all_reduce": 1}, {"all_reduce": 1}),
        ({**plain, "norm": RMSNorm}, {"all_reduce": 1}, {"all_reduce": 2}),
        (
            {**plain, "sequence_parallel": True},
            {"all_gather": 1, "reduce_scatter": 1},
            {"all_gather": 2, "reduce_scatter": 1},
        ),
        ({**plain, "num_kv_heads": 1}, {"all_reduce": 1}, {"all_reduce": 2}),
    ):
        layer = _attention(tp, **options)
        x_TH = torch.randn(4, 16, requires_grad=True)
        length = 4 * (tp.size if layer.sequence_parallel else 1)
        with Traffic() as traffic:
            y_TH = layer(x_TH, positions=torch.arange(length))
        assert traffic.counts() == forward, options
        with Traffic() as traffic:
            y_TH.sum().backward()
        assert traffic.counts() == backward, options


def test_it_is_the_product_of_its_parts():
    """One head of four, by the dense formula."""
    layer = Attention(8, 2, num_kv_heads=1, head_dim=4, dtype=torch.float64)
    x_TH = torch.randn(5, 8, dtype=torch.float64)
    q, k, v = (proj(x_TH) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for head in q.split(4, dim=-1):
        scores = (head @ k.T / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    y_TH = layer(x_TH, positions=torch.arange(5))
    assert_close(y_TH, layer.o_proj(torch.cat(heads, dim=-1)))


def test_gates_stand_behind_the_query_of_their_head():
    gated = Attention(8, 2, num_kv_heads=1, head_dim=4, gated=True, dtype=torch.float64)
    plain = Attention(8, 2, num_kv_heads=1, head_dim=4, dtype=torch.float64)
    q_0, gate_0, q_1, gate_1 = gated.q_proj.weight.split(4)
    plain.load_state_dict({**gated.state_dict(), "q_proj.weight": torch.cat((q_0, q_1))})
    x_TH, positions = torch.randn(5, 8, dtype=torch.float64), torch.arange(5)
    gates = (x_TH @ torch.cat((gate_0, gate_1)).T).sigmoid()
    attended = []
    plain.o_proj.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    plain(x_TH, positions=positions)
    assert_close(gated(x_TH, positions=positions), plain.o_proj(gates * attended[0]))


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"window": (2, None)}, {"window": (2, None)}),
        ({"soft_cap": 0.5}, {"soft_cap": 0.5}),
        ({"sinks": True}, {"sinks": torch.zeros(2, dtype=torch.float64)}),
    ],
)
def test_what_it_is_told_of_the_product_is_asked_for(options, spec):
    """With projections that change nothing."""
    layer = Attention(8, 2, head_dim=4, dtype=torch.float64, **options)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        nn.init.eye_(projection.weight)
    x_TH = torch.randn(1, 6, 8, dtype=torch.float64)
    heads = x_TH.unflatten(-1, (2, 4))
    cu_seqlens = torch.tensor([0, 4, 6])
    for packed in ({}, {"cu_seqlens": cu_seqlens}):
        expected = attention(heads, heads, heads, AttentionSpec(**spec, **packed), backend="naive")
        assert_close(layer(x_TH, positions=torch.arange(6), **packed), expected.flatten(-2))


def test_a_back_end_is_taken_by_name():
    x_TH, positions = torch.randn(5, 16), torch.arange(5)
    layer = _attention(backend="flash_attn")
    with pytest.raises(ValueError, match="backend='flash_attn' does not serve .*tensors on cpu"):
        layer(x_TH, positions=positions)
    layer.backend = "naive"
    expected = layer(x_TH, positions=positions)
    layer.backend = "sdpa"
    assert_close(layer(x_TH, positions=positions), expected)


def test_documents_in_one_row_equal_documents_alone():
    layer = _attention(num_kv_heads=2).double()
    x_TH = torch.randn(7, 16, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    y_TH = layer(x_TH, positions=positions, cu_seqlens=CU_SEQLENS)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        alone = layer(x_TH[start:stop], positions=torch.arange(stop - start))
        assert_close(y_TH[start:stop], alone)


def test_f_100_storage_with_pads_equals_documents_alone():
    layer = _attention(num_kv_heads=2, bias=False).double()
    x_TH = torch.randn(8, 16, dtype=torch.float64)
    y_TH = layer(
        x_TH,
        positions=torch.arange(4).repeat(2),
        cu_seqlens=torch.tensor([0, 3, 5]),
        cu_seqlens_padded=torch.tensor([0, 4, 8]),
    )
    assert_close(y_TH[:3], layer(x_TH[:3], positions=torch.arange(3)))
    assert_close(y_TH[4:6], layer(x_TH[4:6], positions=torch.arange(2)))
    assert not y_TH[[3, 6, 7]].any()


def test_parameters_have_the_names_of_hugging_face():
    layer = Attention(16, 4, num_kv_heads=2, norm=RMSNorm, bias="qkv")
    assert {name: tuple(weight.shape) for name, weight in layer.named_parameters()} == {
        "q_proj.weight": (16, 16),
        "q_proj.bias": (16,),
        "k_proj.weight": (8, 16),
        "k_proj.bias": (8,),
        "v_proj.weight": (8, 16),
        "v_proj.bias": (8,),
        "o_proj.weight": (16, 16),
        "q_norm.weight": (4,),
        "k_norm.weight": (4,),
    }


def test_tables_and_norms_of_a_model_are_those_of_the_layer():
    layer = _attention(num_kv_heads=2)
    x_TH, positions = torch.randn(5, 16), torch.arange(5)
    assert layer.rotary and layer.q_norm and layer.k_norm
    y_TH = layer(
        x_TH,
        positions=positions,
        tables=layer.rotary(positions),
        norms=on_part(layer.q_norm, layer.k_norm, group=layer.tp),
    )
    assert_close(y_TH, layer(x_TH, positions=positions))


def test_injected_projections_are_used():
    modes = []

    def linear(in_features, out_features, *, parallel_mode, bias, device, dtype, **others):
        modes.append((parallel_mode, bias))
        return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    layer = Attention(16, 4, num_kv_heads=2, bias="qkv", linear=linear)
    assert modes == [("column", True)] * 3 + [("row", False)]
    assert layer(torch.ones(3, 16), positions=torch.arange(3)).shape == (3, 16)


def test_positions_of_other_tokens_raise():
    with pytest.raises(ValueError, match="positions has 1 tokens and must have 3"):
        _attention(num_kv_heads=2)(torch.randn(3, 16), positions=torch.arange(1))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_heads": 3}, "num_heads=3 must divide hidden_size=16"),
        ({"num_heads": 4, "window": (1, 1)}, "behind the place of a causal query"),
        ({"num_heads": 4, "soft_cap": -1.0}, "soft_cap=-1.0 must be above 0"),
        ({"num_heads": 4, "backend": "cudnn"}, "backend='cudnn' must be one of"),
    ],
)
def test_bad_sizes_raise(sizes, message):
    with pytest.raises(ValueError, match=message):
        Attention(16, **sizes)


@ranks(4)
def test_heads_that_do_not_divide_over_the_ranks_raise():
    with pytest.raises(ValueError, match="num_heads=6"):
        Attention(12, 6, tp=_tp())
    with pytest.raises(ValueError, match="num_kv_heads=6"):
        Attention(24, 12, num_kv_heads=6, tp=_tp())


@ranks(1, 2, timeout=300)
def test_it_compiles_whole():
    tp = _tp()
    layer = _attention(
        tp,
        num_kv_heads=1,
        sequence_parallel=tp.size > 1,
        gated=True,
        window=(2, None),
        sinks=True,
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for inputs in CASES.values() if tp.size == 1 else [CASES["documents and a tail"]]:
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            x_TH = torch.ones(8 // tp.size, 16).cumsum(-1).sin().requires_grad_()
            y_TH = call(x_TH, **inputs)
            y_TH.square().sum().backward()
            results.append([y_TH, x_TH.grad, *(p.grad for p in layer.parameters())])
        assert_close(*results)


def _attention(
    tp=None, num_kv_heads=4, *, norm=RMSNorm, bias=True, sequence_parallel=False, **options
):
    return Attention(
        16,
        4,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        bias=bias,
        rotary=RotaryEmbedding(8, rotary_dim=4),
        norm=norm,
        sequence_parallel=sequence_parallel,
        **({} if tp is None else {"tp": tp}),
        **options,
    )


def _tp():
    return Mesh(tp=dist.get_world_size()).group("tp")


def _loss(y_TH):
    return (y_TH.sin() * torch.arange(y_TH.shape[-1])).sum()
