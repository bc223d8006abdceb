"""Names choose layers; what must stay stays, and what cannot be rounded is refused whole."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import LOCAL, Mesh, mark
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipes,
    autocast,
    emulated_linear_factory,
)
from megablocks_core.testing import ranks

SPEC = DecoderSpec.from_hf(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 17,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0, 1],
    }
)


def decoder(**options):
    torch.manual_seed(0)
    return Decoder(SPEC, linear=emulated_linear_factory, **options)


def recipes_of(model, recipes):
    return {name: choice.recipe for name, choice in recipes.of(model).items() if choice.recipe}


def test_patterns_match_layers_and_what_they_lie_in():
    found = recipes_of(decoder(), Recipes({"layers.1.self_attn": MXFP8(), "up_proj": NVFP4()}))
    assert found == {
        **{f"model.layers.1.self_attn.{x}_proj": MXFP8() for x in "qkvo"},
        "model.layers.1.mlp.up_proj": NVFP4(),
    }


def test_of_several_patterns_the_last_decides_and_none_takes_out():
    model = decoder()
    recipes = Recipes({"**": MXFP8(), "self_attn.*": CurrentScaling(), "*.o_proj": None})
    found = recipes_of(model, recipes)
    names = [name.removeprefix("model.layers.1.") for name in found if "layers.1." in name]
    assert names == [
        *(f"self_attn.{x}_proj" for x in "qkv"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    ]
    assert found["model.layers.1.self_attn.q_proj"] == CurrentScaling()
    assert found["model.layers.2.mlp.experts"] == MXFP8()


def test_the_first_and_last_blocks_stay():
    model = decoder()
    blocks = [
        {name.split(".")[2] for name in recipes_of(model, recipes)}
        for recipes in (
            Recipes({"**": MXFP8()}),
            Recipes({"**": MXFP8()}, first_bf16=0),
            Recipes({"**": MXFP8()}, first_bf16=0, last_bf16=0),
            Recipes({"**": MXFP8()}, first_bf16=2, last_bf16=1),
        )
    ]
    assert blocks == [set("12"), set("012"), set("0123"), set("2")]


def test_routers_and_the_head_stay_unless_named_outright():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [nn.ModuleDict({"gate": nn.Linear(2, 2), "up": nn.Linear(2, 2)}) for _ in "abc"]
            ),
            "lm_head": nn.Linear(2, 2),
        }
    )
    names = list(recipes_of(model, Recipes({"**": MXFP8()})))
    assert names == ["layers.1.up"]
    for pattern in ("gate", "layers.*.gate"):
        assert list(recipes_of(model, Recipes({pattern: MXFP8()}))) == ["layers.1.gate"]
    assert list(recipes_of(model, Recipes({"lm_head": MXFP8()}))) == ["lm_head"]
    # Without blocks everything is inside.
    assert list(recipes_of(nn.Sequential(nn.Linear(2, 2)), Recipes({"**": MXFP8()}))) == ["0"]


def test_names_are_those_of_the_model_without_wrappers():
    model = torch.compile(nn.Sequential(nn.Linear(2, 2)))
    assert list(recipes_of(model, Recipes({"0": MXFP8()}))) == ["0"]


@pytest.mark.parametrize(
    "patterns",
    [{"no_proj": MXFP8()}, {"**": MXFP8(), "layers.0.*.*": MXFP8()}, {"layers.3": NVFP4()}],
    ids=["none", "first", "last"],
)
def test_a_pattern_that_decides_nothing_is_refused(patterns):
    *_, pattern = patterns
    with pytest.raises(ValueError, match="must match layers") as error:
        Recipes(patterns).of(decoder())
    assert str([pattern]) in str(error.value)


def test_applying_sets_every_layer_and_again_the_other_way():
    model = decoder()
    Recipes({"self_attn": DelayedScaling(amax_history_len=4)}).apply(model)
    layer = model.get_submodule("model.layers.1.self_attn.q_proj")
    assert layer.recipe == DelayedScaling(amax_history_len=4)
    assert "model.layers.1.self_attn.q_proj.fp8.scale_fwd" in model.state_dict()
    Recipes({"mlp.*_proj": NVFP4()}).apply(model)
    assert layer.recipe is None
    assert not [name for name in model.state_dict() if "scale_fwd" in name]
    keys = [int(value) for name, value in model.named_buffers() if name.endswith("fp8.key")]
    assert len(keys) == len(set(keys)) == 3


def test_what_cannot_be_rounded_is_refused_and_nothing_is_changed():
    model = decoder()
    for pattern, kind in (("experts", "GroupedExperts"), ("gate", "TopKRouter"), ("q_norm", "RMS")):
        recipes = Recipes({"self_attn": MXFP8(), pattern: MXFP8()})
        with pytest.raises(ValueError, match=f"{pattern} .{kind}.* must have a recipe to set"):
            recipes.apply(model)
    with pytest.raises(ValueError, match="mesh='tp' must be a Mesh"):
        Recipes({"self_attn": MXFP8()}).apply(model, mesh="tp")
    layer = model.get_submodule("model.layers.1.self_attn.q_proj")
    assert layer.recipe is None


def test_the_table_says_what_decided():
    table = Recipes({"self_attn": MXFP8("hybrid"), "o_proj": None}).table(decoder()).splitlines()
    words = {line.split()[0]: line.split()[1:] for line in table}
    assert words["model.layers.0.mlp.up_proj"] == ["-", "one", "of", "the", "first", "blocks"]
    assert words["model.layers.1.self_attn.q_proj"] == ["MXFP8(format='hybrid')", "self_attn"]
    assert words["model.layers.1.self_attn.o_proj"] == ["-", "o_proj"]
    assert words["model.layers.1.mlp.up_proj"] == ["-", "no", "pattern"]
    assert words["lm_head"] == ["-", "kept", "unless", "named", "outright"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patterns": "**"}, "patterns='\\*\\*' must be a mapping"),
        ({"patterns": {}}, "patterns={} must hold"),
        ({"patterns": {"": MXFP8()}}, "patterns='' must be names"),
        ({"patterns": {"**": "mxfp8"}}, "must be a recipe"),
        ({"patterns": {"**": MXFP8()}, "first_bf16": -1}, "first_bf16=-1"),
        ({"patterns": {"**": MXFP8()}, "last_bf16": True}, "last_bf16=True"),
    ],
)
def test_fields_of_another_kind_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recipes(**arguments)


@ranks(4)
def test_amaxes_are_shared_by_the_ranks_that_one_process_would_be():
    mesh = Mesh(tp=2, dp=2, ep=2, etp=2)
    model = decoder(mesh=mesh)
    recipes = Recipes({"self_attn": BlockScaling(squares="none"), "mlp.up_proj": CurrentScaling()})
    with pytest.raises(ValueError, match="layer .*q_proj.*blocks of 128"):
        recipes.apply(model, mesh=mesh)
    assert all(getattr(module, "recipe", None) is None for module in model.modules())
    Recipes({"mlp.*_proj": CurrentScaling()}).apply(model)
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    assert layer.amax_group == mesh.group("tp")
    experts = model.get_submodule("model.layers.2.mlp.experts")
    experts.recipe, experts.amax_group = None, LOCAL
    Recipes({"mlp": CurrentScaling()}).apply(model, mesh=mesh)
    assert layer.amax_group == mesh.group("tp", "cp", "dp")
    assert experts.amax_group == mesh.expert.group("etp", "edp")
    assert len(experts.amax_group.ranks) == 2 and dist.get_rank() in experts.amax_group.ranks


def test_a_stack_of_experts_is_known_by_its_mark():
    stack = nn.Module()
    stack.up_proj = nn.Parameter(torch.zeros(2, 4, 4))
    mark(stack, "up_proj", each="experts.{}.up_proj.weight", expert=True)
    model = nn.ModuleDict({"experts": stack})
    assert list(recipes_of(model, Recipes({"**": MXFP8()}))) == ["experts"]


def test_the_outer_context_does_nothing_without_transformer_engine():
    for given in (Recipes({"**": MXFP8()}), MXFP8(), [MXFP8(), NVFP4()]):
        with autocast(given):
            pass
    with pytest.raises(ValueError, match="recipes='MXFP8' must be a recipe"):
        autocast(["MXFP8"])


def test_patterns_stay_as_they_were_given():
    given = {"a": MXFP8()}
    recipes = Recipes(given)
    given["b"] = MXFP8()
    assert list(recipes.patterns) == ["a"]
