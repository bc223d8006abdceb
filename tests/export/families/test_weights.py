"""Rows of a table become the tensors of a model."""

import pytest

from megablocks_core.export.families.weights import (
    Family,
    Weight,
    split,
    transpose,
    unstack,
)
from megablocks_core.export.layout import Rule
from megablocks_core.export.operations import Split, Transpose, Unstack

SIZES = {"vocab": 9, "hidden": 4, "gate_up": 6, "experts": 2}
FAMILY = Family(
    "X",
    (
        Weight("wte", "vocab hidden", ours="embed.weight"),
        Weight("h.{}.attn.w", "hidden 1", ours="layers.{}.weight", kind="*"),
        Weight(
            "h.{}.gate_up",
            "gate_up hidden",
            ours=("l.{}.gate", "l.{}.up"),
            kind="-",
            block=1,
            steps=(split("3 3"),),
        ),
        Weight("h.{}.e.{}.w", "hidden", ours="l.{}.experts.{}.w", kind="E", block=1),
        Weight(
            "h.{}.all",
            "experts 5 gate_up",
            ours=("l.{}.e.{}.g", "l.{}.e.{}.u"),
            kind="E",
            block=1,
            steps=(transpose(1, 2), split("1 1", dim=1, groups="3"), unstack()),
        ),
        Weight("h.{}.bias", "hidden", "has_bias", kind="*"),
        Weight("head", "vocab hidden"),
    ),
    lambda config: SIZES,
    lambda config: ["*-", "*E"],
    ("size",),
    defaults={"has_bias": True},
    ties={"head": "embed.weight"},
    ignored=("h.{}.table",),
    blocks=2,
)


def test_rows_become_tensors_layer_by_layer():
    assert FAMILY.layout({"size": 1, "has_bias": False}).rules == (
        Rule({"wte": (9, 4)}, ("embed.weight",)),
        Rule({"h.0.attn.w": (4, 1)}, ("layers.0.weight",)),
        Rule({"h.0.gate_up": (6, 4)}, ("l.1.gate", "l.1.up"), (Split((3, 3)),)),
        Rule({"h.1.attn.w": (4, 1)}, ("layers.2.weight",)),
        Rule({"h.1.e.0.w": (4,)}, ("l.3.experts.0.w",)),
        Rule({"h.1.e.1.w": (4,)}, ("l.3.experts.1.w",)),
        Rule(
            {"h.1.all": (2, 5, 6)},
            ("l.3.e.0.g", "l.3.e.1.g", "l.3.e.0.u", "l.3.e.1.u"),
            (Transpose(1, 2), Split((1, 1), 1, 3), Unstack(2)),
        ),
        Rule({"head": (9, 4)}, ("head",)),
    )


def test_options_and_ties_follow_the_config():
    names = list(FAMILY.layout({"size": 1}).schema)
    assert names[-2:] == ["h.1.bias", "head"]
    assert names.index("h.0.bias") < names.index("h.1.attn.w")
    layout = FAMILY.layout({"size": 1, "tie_word_embeddings": True})
    assert layout.ties == {"head": "wte"}
    assert layout.tied_parts == {"head": "embed.weight"}
    assert "head" not in layout.schema
    assert layout.ignores("h.3.table")
    assert not layout.ignores("h.x.table")


def test_a_missing_size_is_named():
    with pytest.raises(ValueError, match="size"):
        FAMILY.layout({})
