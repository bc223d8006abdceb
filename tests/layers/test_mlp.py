"""Feed-forward layers equal one process at any size, with the traffic they promise."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from transformers.activations import ACT2FN

from megablocks_core.groups import Mesh, gather_from
from megablocks_core.layers.mlp import ACTIVATIONS, MLP, GatedMLP
from megablocks_core.parallel import Dropout, DropoutKey, dropout
from megablocks_core.testing import assert_parallel_equivalence, ranks
from tests.traffic import Traffic

KINDS = (MLP, GatedMLP)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    x_T = torch.linspace(-3, 3, 31)
    assert_close(ACTIVATIONS[name](x_T), ACT2FN[name](x_T))


def test_layers_follow_their_formulas():
    x_TH = torch.randn(5, 8)
    mlp, gated = MLP(8, 12, activation="relu2"), GatedMLP(8, 12)
    assert_close(mlp(x_TH), mlp.down_proj(mlp.up_proj(x_TH).clamp(min=0) ** 2))
    product = nn.functional.silu(gated.gate_proj(x_TH)) * gated.up_proj(x_TH)
    assert_close(gated(x_TH), gated.down_proj(product))
    assert set(mlp.state_dict()) == {
        f"{name}.{kind}" for name in ("up_proj", "down_proj") for kind in ("weight", "bias")
    }
    assert set(gated.state_dict()) == {
        f"{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
    }


@ranks(1, 2, 4)
def test_layers_equal_one_process():
    tp = _tp()
    for kind in KINDS:
        assert_parallel_equivalence(
            lambda group, kind=kind: kind(8, 12, bias=True, tp=group),
            torch.randn(2, 5, 8),
            group=tp,
            loss=_loss,
            same_start=True,
        )


@ranks(1, 2)
def test_layers_that_drop_equal_one_process():
    index = DropoutKey(seed=1, step=2).index(torch.arange(2).unsqueeze(-1), torch.arange(5))
    for kind in KINDS:
        assert_parallel_equivalence(
            lambda group, kind=kind: kind(8, 12, dropout=Dropout(0.3, stream="mlp"), tp=group),
            {"x_TH": torch.randn(2, 5, 8), "dropout_index": index},
            group=_tp(),
            loss=_loss,
            same_start=True,
        )


def test_what_drops_is_what_the_last_projection_takes():
    x_TH, index = torch.randn(5, 8), DropoutKey(1, 2).index(torch.tensor(3), torch.arange(5))
    mlp = MLP(8, 12, dropout=Dropout(0.3, stream="layers.0.mlp"))
    hidden = nn.functional.gelu(mlp.up_proj(x_TH))
    kept = dropout(hidden, 0.3, stream="layers.0.mlp", index=index)
    assert_close(mlp(x_TH, dropout_index=index), mlp.down_proj(kept))
    with pytest.raises(ValueError, match="dropout_index=None .* 'layers.0.mlp' drops"):
        mlp(x_TH)


@ranks(1, 2, 4)
def test_layers_equal_one_process_with_cut_tokens():
    tp = _tp()
    for kind in KINDS:
        assert_parallel_equivalence(
            lambda group, kind=kind: kind(8, 12, bias=True, sequence_parallel=True, tp=group),
            torch.randn(2, 8, 8),
            group=tp,
            loss=_loss,
            split=lambda x: x.chunk(tp.size, dim=-2)[tp.rank],
            join=lambda y: gather_from(y, dim=-2, group=tp),
            same_start=True,
        )


@ranks(2)
def test_traffic_is_that_of_one_column_and_one_row_layer():
    tp = _tp()
    for kind in KINDS:
        for sequence_parallel, forward, backward in (
            (False, {"all_reduce": 1}, {"all_reduce": 1}),
            (
                True,
                {"all_gather": 1, "reduce_scatter": 1},
                {"all_gather": 2, "reduce_scatter": 1},
            ),
        ):
            layer = kind(8, 12, bias=False, sequence_parallel=sequence_parallel, tp=tp)
            x_TH = torch.randn(4, 8, requires_grad=True)
            with Traffic() as traffic:
                y_TH = layer(x_TH)
            assert traffic.counts() == forward
            with Traffic() as traffic:
                y_TH.sum().backward()
            assert traffic.counts() == backward


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layers_copy_and_pickle(name):
    layer, x_TH = GatedMLP(8, 12, activation=name), torch.randn(3, 8)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_close(copied(x_TH), layer(x_TH))


def test_injected_projections_are_used():
    built = []

    def linear(in_features, out_features, *, parallel_mode, bias, device, dtype, **others):
        built.append((in_features, out_features, parallel_mode, sorted(others)))
        return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    layer = GatedMLP(8, 12, linear=linear, dtype=torch.float64)
    others = ["group", "sequence_parallel"]
    assert built == [(8, 12, "column", others)] * 2 + [(12, 8, "row", others)]
    assert layer(torch.ones(2, 8, dtype=torch.float64)).shape == (2, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_activations_raise(kind):
    with pytest.raises(ValueError, match="activation='tanhh'"):
        kind(8, 12, activation="tanhh")


@ranks(2)
def test_indivisible_sizes_raise():
    for kind in KINDS:
        with pytest.raises(ValueError, match="ffn_size=13"):
            kind(8, 13, tp=_tp())


@ranks(1, 2, timeout=300)
def test_layers_compile_whole():
    for kind, sequence_parallel in ((MLP, False), (GatedMLP, True)):
        layer = kind(8, 12, sequence_parallel=sequence_parallel, tp=_tp())
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            x_TH = torch.ones(4, 8, requires_grad=True)
            y_TH = call(x_TH)
            y_TH.square().sum().backward()
            results.append([y_TH, x_TH.grad, *(p.grad for p in layer.parameters())])
        assert_close(*results)


def _tp():
    return Mesh(tp=dist.get_world_size()).group("tp")


def _loss(y_TH):
    return (y_TH.sin() * torch.arange(y_TH.shape[-1])).sum()
