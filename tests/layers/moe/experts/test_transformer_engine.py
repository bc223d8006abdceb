"""Experts of Transformer Engine are ``GroupedExperts``: values, outputs, every gradient."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megablocks_core.ckpt import load, save
from megablocks_core.groups import Mesh, marks
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.layers.moe import AllToAllDispatcher, GroupedExperts, MoE, TopKRouter
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from megablocks_core.layers.moe.experts.transformer_engine import grouped_experts
from megablocks_core.parallel import add_lora, recipes
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.parallel.recipes import CurrentScaling, DelayedScaling, Recipes
from megablocks_core.parallel.recipes.transformer_engine import to_transformer_engine
from megablocks_core.parallel.transformer_engine import linear, rms_norm
from megablocks_core.testing import ranks
from tests.layers.moe.experts.cases import (
    FFN,
    HIDDEN,
    NUM_EXPERTS,
    ROUTINGS,
    built,
    everything,
    routing,
)
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture
from tests.parallel.transformer_engine.fake_quantization import autocast

DELAYED = DelayedScaling(amax_history_len=2)
DOUBLE = {"dtype": torch.float64}


def theirs(**options):
    torch.manual_seed(1)
    return grouped_experts(NUM_EXPERTS, HIDDEN, FFN, **{**DOUBLE, **options})


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients(te, case, bias):
    ours, x = built(bias=bias), torch.randn(len(ROUTINGS[case]), HIDDEN, **DOUBLE)
    for capacity in (None, 3):
        routed = routing(ROUTINGS[case], capacity=capacity)
        expected = everything(ours, x, routed)
        found = everything(theirs(bias=bias), x, routed)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(te, activation):
    x, routed = torch.randn(5, HIDDEN, **DOUBLE), routing(ROUTINGS["mixed"])
    found = everything(theirs(activation=activation), x, routed)
    expected = everything(built(activation=activation), x, routed)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_copies_and_pickles(te):
    experts, x = theirs(bias=True), torch.randn(5, HIDDEN, **DOUBLE)
    routed = routing(ROUTINGS["mixed"])
    expected = everything(experts, x, routed)
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        torch.testing.assert_close(everything(copied, x, routed), expected, rtol=0, atol=0)


def test_names_and_marks_are_ours(te):
    found, expected = theirs(bias=True), built(bias=True)
    assert list(found.state_dict()) == list(expected.state_dict())
    assert [(name, specs) for name, _, specs in marks(found)] == [
        (name, specs) for name, _, specs in marks(expected)
    ]


@ranks(2, 4)
def test_a_mixture_over_ranks_is_ours():
    size = dist.get_world_size()
    with fake.installed():
        for axes in ({"ep": 2}, {"tp": 2, "etp": 2}):
            mesh = Mesh(**axes)
            ep, etp, tp = (
                mesh.expert.group("ep"),
                mesh.expert.group("etp"),
                mesh.group("tp"),
            )
            results = []
            for build in (grouped_experts, GroupedExperts):
                torch.manual_seed(1)
                moe = MoE(
                    router=TopKRouter(HIDDEN, num_experts=4, top_k=2, **DOUBLE),
                    dispatcher=AllToAllDispatcher(
                        num_experts=4, ep=ep, etp=etp, tp=tp, tokens="replicated"
                    ),
                    experts=build(4, HIDDEN, FFN, bias=True, ep=ep, etp=etp, **DOUBLE),
                )
                torch.manual_seed(dist.get_rank() // tp.size)
                x = torch.randn(6, HIDDEN, **DOUBLE).requires_grad_()
                y, _ = moe(x)
                y.square().sum().backward()
                grads = {name: each.grad for name, each in moe.named_parameters()}
                results.append({"y": y.detach(), "x": x.grad, **grads})
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    assert size in (2, 4)


@ranks(2)
def test_checkpoints_go_between_layouts_and_to_ours(tmp_path):
    mesh = Mesh(ep=2)
    ep, world = mesh.expert.group("ep"), mesh.group("dp")
    with fake.installed():
        experts = theirs(bias=True, ep=ep)
        save(tmp_path / "a", {"experts": experts}, group=world)
        etp = Mesh(tp=2, etp=2).expert.group("etp")
        torch.manual_seed(99)
        for other in (
            grouped_experts(NUM_EXPERTS, HIDDEN, FFN, bias=True, etp=etp, **DOUBLE),
            GroupedExperts(NUM_EXPERTS, HIDDEN, FFN, bias=True, etp=etp, **DOUBLE),
        ):
            load(tmp_path / "a", {"experts": other}, group=world)
            whole = theirs(bias=True)
            part = slice(etp.rank * FFN // 2, (etp.rank + 1) * FFN // 2)
            assert torch.equal(other.up_proj, whole.up_proj[:, part])
            assert torch.equal(other.down_proj, whole.down_proj[:, :, part])


def spec():
    return DecoderSpec.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        }
    )


@ranks(1, 2)
def test_a_decoder_of_their_parts_is_a_decoder():
    size = dist.get_world_size()
    with fake.installed():
        for mesh, sequence_parallel in (
            (Mesh(tp=size, etp=1, ep=size), False),
            (Mesh(tp=size, etp=size), True),
        ):
            options = {"mesh": mesh, "sequence_parallel": sequence_parallel, **DOUBLE}
            injected = {"linear": linear, "norm": rms_norm, "experts": grouped_experts}
            results = []
            for given in (injected, {}):
                model = Decoder(spec(), **given, **options)
                reset_parameters(model, seed=0)
                tokens = torch.arange(16).view(2, 8) % 32
                output = model(tokens)
                output.logits.square().mean().backward()
                grads = {name: each.grad for name, each in model.named_parameters()}
                values = {f"value {name}": each for name, each in model.state_dict().items()}
                results.append({"logits": output.logits.detach(), **values, **grads})
            torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


def test_recipes_round_and_keep_scales_by_projection(te):
    torch.manual_seed(1)
    experts = grouped_experts(NUM_EXPERTS, 16, 32)
    x, routed = torch.randn(5, 16), routing(ROUTINGS["mixed"], dtype=torch.float32)
    exact = everything(experts, x, routed)
    experts.recipe = CurrentScaling()
    rounded = everything(experts, x, routed)
    assert 0 < (rounded["y"] - exact["y"]).norm() / exact["y"].norm() < 0.1
    experts.recipe = recipe = DelayedScaling(amax_history_len=2)
    names = {name for name in experts.state_dict() if name.startswith("fp8")}
    assert "fp8.down_proj.amax_history_bwd" in names and len(names) == 12
    with autocast(recipe=to_transformer_engine(recipe)):
        everything(experts, x, routed)
    assert experts.scales["up_proj"].scale_fwd[1] == 448 / experts.up_proj[0].abs().max()


@ranks(2)
def test_recipes_reach_the_parts_of_a_decoder():
    mesh = Mesh(tp=2, ep=2)
    chosen = Recipes({"*_proj": DELAYED, "*experts": DELAYED}, first_bf16=1, last_bf16=0)
    with fake.installed():
        model = Decoder(spec(), mesh=mesh, linear=linear, norm=rms_norm, experts=grouped_experts)
        chosen.apply(model, mesh=mesh)
        rounded = {n for n, each in model.named_modules() if getattr(each, "recipe", None)}
        assert rounded == {
            "model.layers.1.mlp.experts",
            *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"),
        }
        for _ in range(2):
            with recipes.autocast(chosen):
                output = model(torch.arange(16).view(1, 16))
            output.logits.square().mean().backward()
        layer: Any = model.get_submodule("model.layers.1")
        experts = layer.mlp.experts
        assert experts.scales["up_proj"].scale_fwd[1] > 1
        assert layer.self_attn.o_proj.scales.scale_bwd[0] > 1


def test_adapters_that_are_not_merged_are_refused(te):
    model = torch.nn.ModuleDict({"experts": theirs()})
    add_lora(model, ["*up_proj*"], rank=2, alpha=4)
    dispatched_like = routing(ROUTINGS["mixed"])
    with pytest.raises(ValueError, match="adapters must be merged"):
        everything(model["experts"], torch.randn(5, HIDDEN, **DOUBLE), dispatched_like)
