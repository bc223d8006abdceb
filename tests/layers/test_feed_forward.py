"""Which layers of a decoder have experts, who builds them, and the losses of their routings."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.layers import Decoder, DecoderSpec, GatedMLP, MoESpec
from megablocks_core.layers.feed_forward import counted_tokens, routing_losses
from megablocks_core.layers.moe import (
    GroupedExperts,
    MoE,
    load_balance_loss,
    route_top_k,
    total_loss,
    z_loss,
)
from megablocks_core.parallel import reset_parameters
from megablocks_core.testing import ranks

F64 = torch.float64
TOKENS = torch.arange(14).view(2, 7) * 7


def _spec(**moe):
    fields = {"num_experts": 4, "top_k": 2, "ffn_size": 20, **moe}
    return DecoderSpec(97, 32, 48, 4, 4, 2, 8, moe=MoESpec(**fields))


def test_sparse_layers_are_those_that_the_spec_says():
    decoder = Decoder(_spec(sparse_step=2, dense_layers=(3,)), device="meta")
    kinds = [type(_mlp(decoder, layer)) for layer in range(4)]
    assert kinds == [GatedMLP, MoE, GatedMLP, GatedMLP]


def test_shared_experts_and_their_gate_are_built():
    decoder = Decoder(_spec(shared_ffn_size=12, shared_gate=True), dtype=F64)
    moe = _mlp(decoder, 0)
    assert moe.shared_experts.up_proj.weight.shape == (12, 32)
    assert moe.shared_expert_gate.weight.shape == (1, 32)
    decoder(TOKENS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_injected_experts_take_the_place_of_grouped_ones():
    class Own(GroupedExperts):
        pass

    decoder = Decoder(_spec(dense_layers=(1,)), experts=Own)
    kinds = [type(getattr(_mlp(decoder, layer), "experts", None)) for layer in range(4)]
    assert kinds == [Own, type(None), Own, Own]
    assert type(_mlp(decoder, 1)) is GatedMLP


def test_f074_seven_layers_give_seven_terms_a_step_and_memory_is_flat():
    """Recomputed training and evaluation in turn, 50 steps; a loss of weight 0 is let go."""
    torch.manual_seed(0)
    moe = MoESpec(num_experts=4, top_k=2, ffn_size=4)
    decoder = Decoder(DecoderSpec(97, 8, 12, 7, 2, 1, 4, moe=moe), recompute="layers.*")
    alive = []
    for step in range(50):
        output = decoder.train()(TOKENS)
        assert [len(output.losses[name]) for name in ("load_balance", "z")] == [7, 7]
        assert [int(load.sum()) for load in output.tokens_per_expert] == [14 * 2] * 7
        auxiliary = total_loss(output.losses, {"load_balance": 0.1, "z": 0.0})
        (output.logits.square().mean() + auxiliary).backward()
        with torch.no_grad():
            evaluated = decoder.eval()(TOKENS)
        assert [len(evaluated.losses[name]) for name in ("load_balance", "z")] == [7, 7]
        if step in (4, 49):
            gc.collect()
            alive.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert alive[1] <= alive[0]  # what tests before left behind may go meanwhile


def test_values_depend_on_seed_and_name_alone():
    torch.manual_seed(0)
    built = Decoder(_spec(shared_ffn_size=12, shared_gate=True))
    from_meta = Decoder(built.spec, device="meta").to_empty(device="cpu")
    for decoder in (built, from_meta):
        reset_parameters(decoder, seed=3)
    assert_close(from_meta.state_dict(), built.state_dict(), rtol=0, atol=0)
    experts = _mlp(built, 0).experts
    assert experts.up_proj.std().item() == pytest.approx(0.02, rel=0.05)


@ranks(4)
def test_one_seed_is_one_model_at_any_layout():
    for sizes in ({"tp": 2, "ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}):
        torch.manual_seed(0)
        whole = Decoder(_spec())
        torch.manual_seed(0)
        cut = Decoder(_spec(), mesh=Mesh(**sizes))
        experts = _mlp(cut, 0).experts
        rows = _mlp(whole, 0).experts.up_proj[experts.experts, experts.features]
        assert torch.equal(experts.up_proj, rows)
        gate = _mlp(cut, 0).gate
        assert torch.equal(gate.weight, _mlp(whole, 0).gate.weight)
    assert dist.get_world_size() == 4


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_activations_that_no_gated_expert_has_raise(activation):
    spec = DecoderSpec(97, 32, 48, 1, 4, 2, 8, activation=activation, moe=MoESpec(4, 2, 20))
    with pytest.raises(ValueError, match=f"activation='{activation}' must be one of silu"):
        Decoder(spec, device="meta")


def test_losses_are_sums_and_counts_of_each_layer():
    routings = [_routing(seed) for seed in range(3)]
    options = {"num_tokens": 9, "row_length": 9, "cu_seqlens": None, "group": LOCAL}
    losses = routing_losses(routings, **options)
    for name, loss in (("load_balance", load_balance_loss), ("z", z_loss)):
        for (total, count), routing in zip(losses[name], routings, strict=True):
            assert_close(total / count, loss(routing))
            assert count == 9
    assert routing_losses([], **options) == {}


@ranks(1, 2, 4)
def test_losses_depend_on_neither_micro_batches_nor_packing_nor_layout():
    torch.manual_seed(0)
    spec = _spec()
    whole = Decoder(spec, dtype=F64)(TOKENS).losses

    def totals(*losses):
        return {
            name: [
                (sum(total for total, _ in parts), sum(count for _, count in parts))
                for parts in zip(*(each[name] for each in losses), strict=True)
            ]
            for name in whole
        }

    for options in ({}, {"sequence_parallel": True}):
        torch.manual_seed(0)
        mesh = Mesh(tp=dist.get_world_size())
        decoder = Decoder(spec, mesh=mesh, dtype=F64, **options)
        assert_close(decoder(TOKENS).losses, whole, atol=1e-10, rtol=0)
        rows = [decoder(row).losses for row in TOKENS]
        assert_close(totals(*rows), whole, atol=1e-10, rtol=0)
        packed = decoder(TOKENS.view(-1), cu_seqlens=torch.tensor([0, 7, 14])).losses
        assert_close(packed, whole, atol=1e-10, rtol=0)


def test_the_decoder_gives_losses_and_loads_of_its_sparse_layers():
    torch.manual_seed(0)
    decoder = Decoder(_spec(dense_layers=(0, 2)), dtype=F64)
    output = decoder(TOKENS)
    assert {name: len(each) for name, each in output.losses.items()} == {"load_balance": 2, "z": 2}
    assert [int(load.sum()) for load in output.tokens_per_expert] == [28, 28]
    hidden = decoder(TOKENS, head=False)
    assert_close(hidden.losses, output.losses)
    assert_close(hidden.tokens_per_expert, output.tokens_per_expert)
    dense = Decoder(DecoderSpec(97, 32, 48, 1, 4, 2, 8))(TOKENS)
    assert dense.losses == {} and dense.tokens_per_expert == ()


def test_pads_between_documents_go_to_no_expert():
    torch.manual_seed(0)
    decoder = Decoder(_spec(), dtype=F64)
    packed, cu_seqlens = TOKENS.view(-1)[:5], torch.tensor([0, 2, 5])
    storage = torch.tensor([*packed[:2], 96, *packed[2:], 96, 96])
    without = decoder(packed, cu_seqlens=cu_seqlens)
    padded = decoder(storage, cu_seqlens=cu_seqlens, cu_seqlens_padded=torch.tensor([0, 3, 8]))
    assert_close(padded.losses, without.losses)
    assert_close(padded.tokens_per_expert, without.tokens_per_expert)
    assert_close(padded.logits[[0, 1, 3, 4, 5]], without.logits)


def test_which_tokens_count():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    assert counted_tokens(tokens, None, None, 0) is None
    assert counted_tokens(tokens, None, None, 1).tolist() == [[True] * 5 + [False]] * 2
    cu_seqlens, padded = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 4])
    mask = counted_tokens(tokens[0], cu_seqlens, padded, 1)
    assert mask.tolist() == [True, False, True, False, False, False]


def _routing(seed):
    generator = torch.Generator().manual_seed(seed)
    return route_top_k(torch.randn(9, 4, dtype=F64, generator=generator), top_k=2)


def test_a_dense_model_builds_its_feed_forward_layers_with_experts():
    class Double(nn.Module):
        def __init__(self, hidden_size, ffn_size, **options):
            super().__init__()
            self.inner = GatedMLP(hidden_size, ffn_size, **options)

        def forward(self, x):
            return 2 * self.inner(x)

    decoder = Decoder(DecoderSpec(97, 32, 48, 1, 4, 2, 8), experts=Double)
    assert type(_mlp(decoder, 0)) is Double


def _mlp(decoder, layer) -> Any:
    return decoder.get_submodule(f"model.layers.{layer}.mlp")
