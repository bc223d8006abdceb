"""Rounded experts are the plain ones where nothing is rounded, and one process at any layout."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.ckpt import load, save
from megablocks_core.groups import LOCAL, Mesh, gather_from, gather_whole, marks
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.layers.moe import AllToAllDispatcher, GroupedExperts, MoE, TopKRouter
from megablocks_core.layers.moe.dispatch import Dispatched, LocalDispatcher
from megablocks_core.layers.moe.experts.emulated import emulated_experts
from megablocks_core.parallel import add_lora, recompute, reduce_gradients
from megablocks_core.parallel.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipes,
    emulated_linear,
    emulated_linear_factory,
    state_for,
)
from megablocks_core.testing import ranks
from tests.layers.moe.experts.cases import ROUTINGS, built, everything, routing

ALL = [DelayedScaling(amax_history_len=3), CurrentScaling(), BlockScaling(), MXFP8(), NVFP4()]
DOUBLE = {"dtype": torch.float64}


def name_of(recipe):
    return type(recipe).__name__


def rounded(recipe=None, sizes=(4, 8, 16), **options) -> Any:
    torch.manual_seed(1)
    made = emulated_experts(*sizes, **{**DOUBLE, **options})
    made.recipe = recipe
    return made


class Twin(GroupedExperts):
    """Expert after expert by ``emulated_linear``, each with a state of its own."""

    recipe: Any
    states: Any

    def forward(self, dispatched: Dispatched):
        pieces, start = [], 0
        for expert, count in enumerate(dispatched.tokens_per_expert.tolist()):
            rows = slice(start, start + count)
            x, weights = dispatched.x[dispatched.rows[rows]], dispatched.weights[rows, None]
            gate, up = self.product("gate", x, expert), self.product("up", x, expert)
            hidden = self.formula.activation.forward(gate, up) * weights
            y = self.product("down", hidden, expert)
            if self.down_bias is not None:
                y = y + weights * self.down_bias[expert]
            pieces.append(y)
            start += count
        rest = dispatched.x.new_zeros(len(dispatched.rows) - start, self.hidden_size)
        return torch.cat([*pieces, rest])

    def product(self, name, x, expert):
        weight, bias = (getattr(self, f"{name}_{leaf}") for leaf in ("proj", "bias"))
        if weight is None:
            return None
        state = self.states[name, expert]
        y = emulated_linear(x, weight[expert], recipe=self.recipe, state=state)
        return y if bias is None or name == "down" else y + bias[expert]


def twin(recipe, **options):
    torch.manual_seed(1)
    made = Twin(4, 8, 16, **{**DOUBLE, **options})
    made.recipe = recipe
    names = [(name, expert) for name in ("gate", "up", "down") for expert in range(4)]
    made.states = {name: state_for(recipe) for name in names}
    return made


@pytest.mark.parametrize("case", ROUTINGS)
def test_without_a_recipe_they_are_the_plain_ones(case):
    x = torch.randn(len(ROUTINGS[case]), 8, **DOUBLE)
    found, expected = rounded(bias=True), built(bias=True)
    assert list(found.state_dict()) == list(expected.state_dict())
    assert [(n, s) for n, _, s in marks(found)] == [(n, s) for n, _, s in marks(expected)]
    routed = routing(ROUTINGS[case])
    assert_close(everything(found, x, routed), everything(expected, x, routed), rtol=0, atol=0)


# Chances of several experts come from keys that the twin does not have.
@pytest.mark.parametrize("recipe", [*ALL[:4], NVFP4(stochastic_rounding=False)], ids=name_of)
@pytest.mark.parametrize("case", ROUTINGS)
def test_each_expert_is_three_rounded_layers(recipe, case):
    x, routed = torch.randn(len(ROUTINGS[case]), 8, **DOUBLE), routing(ROUTINGS[case])
    ours, theirs = rounded(recipe, bias=True), twin(recipe, bias=True)
    for factor in (1.0, 3.0):
        found, expected = (everything(each, factor * x, routed) for each in (ours, theirs))
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_capacity_changes_nothing():
    x = torch.randn(5, 8, **DOUBLE)
    routed, experts = routing(ROUTINGS["mixed"]), rounded(MXFP8(), bias=True)
    expected = everything(experts, x, routed)
    for capacity in (4, 7):
        found = everything(experts, x, routed._replace(capacity=capacity))
        assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), CurrentScaling()])
def test_tokens_in_other_order_are_the_same(recipe):
    routed, x = routing(ROUTINGS["mixed"]), torch.randn(5, 8, **DOUBLE)
    order = torch.tensor([3, 1, 4, 0, 2])
    other = routed._replace(indices=routed.indices[order], weights=routed.weights.detach()[order])
    experts = rounded(recipe)
    again = copy.deepcopy(experts)
    for _ in range(2):
        y, gradients = _stepped(experts, x, routed)
        other_y, other_gradients = _stepped(again, x[order], other)
        assert_close(other_y, y[order])
        assert_close(other_gradients, gradients)
    for name, value in experts.named_buffers():
        assert_close(again.get_buffer(name), value)


def _stepped(experts, x, routed):
    """Outputs and parameters' gradients of a loss that does not know the order of tokens."""
    dispatcher = LocalDispatcher()
    dispatched, handle = dispatcher.dispatch(x, routed)
    experts.zero_grad()
    y = dispatcher.combine(experts(dispatched), handle)
    y.square().sum().backward()
    return y.detach(), [parameter.grad for parameter in experts.parameters()]


def mixture(mesh, recipe, sizes, whole=False):
    ep, etp, tp = LOCAL, LOCAL, LOCAL
    if not whole:
        ep, etp = mesh.expert.group("ep"), mesh.expert.group("etp")
        tp = mesh.group("tp")
    num_experts, hidden, _ = sizes
    torch.manual_seed(1)
    made = MoE(
        router=TopKRouter(hidden, num_experts=num_experts, top_k=2, **DOUBLE),
        dispatcher=AllToAllDispatcher(
            num_experts=num_experts, ep=ep, etp=etp, tp=tp, tokens="replicated"
        ),
        experts=emulated_experts(*sizes, bias=True, ep=ep, etp=etp, **DOUBLE),
    )
    model: Any = torch.nn.ModuleDict({"mlp": made})
    Recipes({"experts": recipe}).apply(model, mesh=None if whole else mesh)
    return model


def step(model, x):
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y, _ = model["mlp"](x)
    y.square().sum().backward()
    return y.detach(), x.grad


def layouts(size):
    return [{"ep": size}, *([{"tp": 2, "etp": 2, "ep": size // 2}] if size > 1 else [])]


@ranks(2)
def test_a_mixture_over_ranks_is_one_process():
    check_layouts()


@pytest.mark.slow
@ranks(1, 4)
def test_a_mixture_over_one_and_four_ranks_is_one_process():
    check_layouts()


def check_layouts():
    size = dist.get_world_size()
    for axes in layouts(size):
        mesh = Mesh(**axes)
        dp, world = mesh.group("dp"), mesh.group("tp", "dp")
        for recipe in ALL:
            # Features that etp can cut; all rows of an expert lie on one rank of ep.
            sizes = (4, 16, 256 if isinstance(recipe, BlockScaling) else 64)
            one, cut = mixture(mesh, recipe, sizes, whole=True), mixture(mesh, recipe, sizes)
            generator = torch.Generator().manual_seed(2)
            for _ in range(2 if state_for(recipe) else 1):
                x = torch.randn(4 * dp.size, 16, generator=generator, **DOUBLE)
                own = slice(4 * dp.rank, 4 * dp.rank + 4)
                y, dx = step(one, x)
                own_y, own_dx = step(cut, x[own])
                reduce_gradients(
                    cut, group=dp, expert_group=mesh.expert.group("edp"), reduction="sum"
                )
                assert_close(own_y, y[own])
                assert_close(own_dx, dx[own])
                found = copy.deepcopy(cut)
                for name, parameter in cut.named_parameters():
                    found.get_parameter(name).data = parameter.grad
                gradients = gather_whole(found)
                for name, value in gather_whole_gradients(one).items():
                    assert_close(gradients[name], value)
        assert world.size == size


def gather_whole_gradients(model):
    found = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        found.get_parameter(name).data = parameter.grad
    return gather_whole(found)


@ranks(2)
def test_scales_of_experts_go_to_other_layouts_and_training_goes_on(tmp_path):
    recipe = DelayedScaling(amax_history_len=3)
    sizes = (4, 16, 32)
    meshes = [Mesh(ep=2), Mesh(tp=2, etp=2), Mesh(ep=2)]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), **DOUBLE)
    first = mixture(meshes[0], recipe, sizes)
    own = slice(4 * meshes[0].group("dp").rank, 4 * meshes[0].group("dp").rank + 4)
    for factor in (1.0, 4.0):
        step(first, factor * x[own])
    world = meshes[0].group("dp")
    save(tmp_path / "a", {"model": first}, group=world)
    second = mixture(meshes[1], recipe, sizes)
    load(tmp_path / "a", {"model": second}, group=world)
    assert second["mlp"].experts.fp8.up_proj.scale_fwd.shape == (12,)
    save(tmp_path / "b", {"model": second}, group=world)
    third = mixture(meshes[2], recipe, sizes)
    load(tmp_path / "b", {"model": third}, group=world)
    for name, value in first.named_buffers():
        assert torch.equal(third.get_buffer(name), value), name
    y, _ = step(first, 0.3 * x[own])
    again, _ = step(third, 0.3 * x[own])
    on_tp, _ = step(second, 0.3 * x)
    assert torch.equal(again, y)
    assert_close(on_tp[own], y)


def test_copies_pickles_new_values_and_no_recipe():
    experts, x = rounded(DelayedScaling(amax_history_len=2)), torch.randn(5, 8, **DOUBLE)
    routed = routing(ROUTINGS["mixed"])
    everything(experts, x, routed)
    names = [name for name in experts.state_dict() if name.startswith("fp8")]
    assert len(names) == 12 and "fp8.down_proj.amax_history_bwd" in names
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        found, expected = (everything(copy.deepcopy(m), x, routed) for m in (other, experts))
        assert_close(found, expected, rtol=0, atol=0)
    assert experts.fp8.up_proj.scale_fwd[1] == 448 / experts.up_proj[0].abs().max().float()
    experts.reset_parameters()
    assert set(experts.fp8.up_proj.scale_fwd.tolist()) == {1.0}
    experts.recipe = None
    assert list(experts.state_dict()) == ["gate_proj", "up_proj", "down_proj"]


def test_an_expert_without_tokens_keeps_its_scales():
    experts = rounded(DelayedScaling(amax_history_len=1))
    for case in ("every expert", "all to one"):
        everything(experts, torch.randn(len(ROUTINGS[case]), 8, **DOUBLE), routing(ROUTINGS[case]))
        if case == "every expert":
            before = experts.fp8.up_proj.scale_fwd.clone()
    after = experts.fp8.up_proj.scale_fwd
    assert after[0] == before[0] and after[3] != before[3]


def test_every_expert_is_rounded_by_chances_of_its_own():
    experts = rounded(NVFP4(hadamard=False))
    with torch.no_grad():
        for weight in (experts.gate_proj, experts.up_proj, experts.down_proj):
            weight.copy_(weight[:1].expand_as(weight))
    x = torch.randn(1, 8, **DOUBLE).expand(4, 8)
    routed = routing([[0], [1], [2], [3]])
    routed = routed._replace(weights=torch.ones_like(routed.weights))
    y, _ = _stepped(experts, x, routed)
    assert torch.equal(y[0], y[1])
    assert not torch.equal(experts.up_proj.grad[0], experts.up_proj.grad[1])


def test_adapters_stay_in_the_models_dtype():
    experts, x = rounded(MXFP8()), torch.randn(5, 8, **DOUBLE)
    routed = routing(ROUTINGS["mixed"])
    before = everything(experts, x, routed)["y"]
    add_lora(torch.nn.ModuleDict({"experts": experts}), ["*_proj*"], rank=2, alpha=4)
    assert torch.equal(everything(experts, x, routed)["y"], before)
    with torch.no_grad():
        for adapter in experts.stack_adapters.values():
            adapter.b.weight.normal_()
    plain = built()
    add_lora(torch.nn.ModuleDict({"experts": plain}), ["*_proj*"], rank=2, alpha=4)
    plain.load_state_dict(experts.state_dict())
    # Far above the rounding: adapters alone make outputs larger by their own products.
    found, expected = everything(experts, x, routed), everything(plain, x, routed)
    assert (found["y"] - before).norm() > before.norm()
    for name in expected:
        if expected[name] is not None:
            assert (found[name] - expected[name]).norm() < 0.2 * expected[name].norm(), name


@pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4()], ids=name_of)
def test_a_region_that_runs_again_counts_one_step(recipe):
    plain = torch.nn.ModuleDict({"mlp": mixture(None, recipe, (4, 16, 32), whole=True)["mlp"]})
    other, x = copy.deepcopy(plain), torch.randn(6, 16, **DOUBLE)
    for _ in range(2):
        for model, run in ((plain, lambda m, x: m(x)), (other, recompute)):
            run(model["mlp"], x)[0].square().sum().backward()
    for (name, one), (_, two) in zip(
        plain.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one.grad is None or torch.equal(one.grad, two.grad), name
    for name, value in plain.named_buffers():
        assert torch.equal(other.get_buffer(name), value), name


def test_autocast_decides_the_dtype():
    experts, x = rounded(CurrentScaling(), dtype=torch.float32), torch.randn(5, 8)
    routed = routing(ROUTINGS["mixed"], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = everything(experts, x, routed)
    assert found["up_proj"].dtype == torch.float32
    narrow = copy.deepcopy(experts).to(torch.bfloat16)
    expected = everything(narrow, x.bfloat16(), routed)
    assert_close(found["up_proj"], expected["up_proj"].float(), rtol=2e-2, atol=1e-3)


@ranks(2)
def test_a_cut_inside_a_block_and_wrong_features_are_refused():
    etp = Mesh(tp=2, etp=2).expert.group("etp")
    experts = rounded(sizes=(4, 64, 96), etp=etp)
    with pytest.raises(ValueError, match="blocks of 32, which must lie on one rank"):
        experts.recipe = MXFP8()
    assert experts.recipe is None
    experts.recipe = NVFP4()
    with pytest.raises(ValueError, match=r"x of shape \[5, 7\] must be \[M 64\]"):
        everything(experts, torch.randn(5, 7, **DOUBLE), routing(ROUTINGS["mixed"]))


SPEC = {
    "model_type": "qwen3_moe",
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@ranks(1, 2)
def test_recipes_serve_the_mixtures_of_a_decoder():
    size = dist.get_world_size()
    recipes = Recipes({"self_attn": CurrentScaling(), "experts": NVFP4()})
    results = []
    for mesh in (None, Mesh(tp=size, etp=1, ep=size)):
        torch.manual_seed(0)
        parts = {"linear": emulated_linear_factory, "experts": emulated_experts}
        model = Decoder(DecoderSpec.from_hf(SPEC), mesh=mesh, **parts, **DOUBLE)
        choices = recipes.apply(model, mesh=mesh)
        assert choices["model.layers.1.mlp.experts"] == (NVFP4(), "experts")
        assert choices["model.layers.0.mlp.experts"] == (None, "one of the first blocks")
        assert "model.layers.1.mlp.experts       NVFP4()" in recipes.table(model)
        tp = LOCAL if mesh is None else mesh.group("tp")
        logits = gather_from(model(torch.arange(16).view(1, 16)).logits, dim=-1, group=tp)
        logits.square().mean().backward()
        router: Any = model.get_submodule("model.layers.1.mlp.gate")
        results.append((logits.detach(), router.weight.grad))
    assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    keys = {int(state.key) for state in experts.fp8.children()}
    assert len(keys) == 3 and 0 not in keys
