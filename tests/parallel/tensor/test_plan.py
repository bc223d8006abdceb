"""Plans in words, records and transformers' own styles are read, or refused by name."""

import pytest
from torch import nn

from megablocks_core.parallel.tensor.plan import (
    Column,
    Experts,
    Replicated,
    Row,
    Vocab,
    Whole,
    read_plan,
)
from tests.parallel.tiny_models import tiny_model


def _stack():
    layers = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


def test_a_star_is_one_step_of_a_name_and_later_patterns_win():
    plan = {"layers.*.up": "column", "layers.*.*": "whole", "layers.1.up": Column(unit=4)}
    assert read_plan(_stack(), plan) == {
        "layers.0.up": Whole(),
        "layers.1.up": Column(unit=4),
        "layers.0.down": Whole(),
        "layers.1.down": Whole(),
    }


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("everything", '"auto" or map'),
        ("auto", "needs a model with a plan"),
        ({"layers.0.up": "colwise"}, r"plan\['layers.0.up'\]='colwise' must be one of"),
        ({"layers.0.up": 3}, "=3 must be one of"),
        ({"up": "column", "layers.0.*": "row"}, r"not \['up'\]"),
    ],
)
def test_plans_that_cannot_be_read_are_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        read_plan(_stack(), plan)


def test_a_transformers_model_brings_its_own_plan():
    styles = read_plan(tiny_model("mixtral"), "auto")
    assert styles["model.embed_tokens"] == Vocab()
    assert styles["lm_head"] == Column(gather=True)
    layer = "model.layers.1"
    assert styles[f"{layer}.self_attn.q_proj"] == Column()
    assert styles[f"{layer}.self_attn.k_proj"] == Column(repeat=True)
    assert styles[f"{layer}.self_attn.o_proj"] == Row()
    assert styles[f"{layer}.mlp.experts"] == Experts()
    assert styles[f"{layer}.mlp.experts.gate_up_proj"] == Column(segments=(1, 1))
    assert read_plan(tiny_model("qwen3"), "auto")[f"{layer}.self_attn.q_norm"] == Replicated()


def test_without_a_merged_plan_that_of_the_config_counts():
    model = tiny_model("llama").model
    model._tp_plan = {}
    styles = read_plan(model, "auto")
    assert styles["layers.0.mlp.down_proj"] == Row() and "embed_tokens" not in styles


def test_styles_that_are_not_served_are_named():
    model = tiny_model("llama")
    model._tp_plan["lm_head"] = "mla_kv_a_proj"
    with pytest.raises(ValueError, match="not served: {'lm_head': 'mla_kv_a_proj'}"):
        read_plan(model, "auto")
