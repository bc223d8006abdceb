"""Rows of a table become the tensors of a model."""

from dataclasses import replace

import pytest

from megablocks_core.export.families.weights import (
    Family,
    Weight,
    split,
    transpose,
    unstack,
)
from megablocks_core.export.layout import Rule
from megablocks_core.export.operations import Join, Split, Stack, Transpose, Unstack

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


def test_several_entries_may_be_asked_for():
    weights = tuple(
        Weight(when, "hidden", when) for when in ("a", "not a", "a and b", "not a and b")
    )
    family = Family("X", weights, lambda _: {"hidden": 4}, lambda _: [], ())
    for config, names in (
        ({}, ["not a"]),
        ({"a": 1}, ["a"]),
        ({"a": None, "b": True}, ["not a", "not a and b"]),
        ({"a": 1, "b": 2}, ["a", "a and b"]),
    ):
        assert list(family.layout(config).schema) == names


def test_rows_in_memory_lead_from_files_to_what_a_module_holds():
    row = Weight(
        "m.{}.gate_up",
        "experts 6 hidden",
        ours=("h.{}.e.{}.g", "h.{}.e.{}.u"),
        kind="E",
        steps=(split("3 3", dim=1), unstack()),
    )
    (rule,) = replace(FAMILY, in_memory=(row,)).layout({"size": 1}).in_memory
    assert rule == Rule(
        {f"h.1.e.{expert}.{part}": (3, 4) for part in "gu" for expert in range(2)},
        ("m.1.gate_up",),
        (Stack(2), Join((3, 3), 1)),
    )
    assert rule.shapes == {"m.1.gate_up": (2, 6, 4)}


def test_layers_behind_the_last_are_not_read():
    family = replace(FAMILY, predictors=("h.{}.w", "h.{}.e.{}.w"))
    layout = family.layout({"size": 1, "num_nextn_predict_layers": 2})
    for name in ("h.2.w", "h.3.w", "h.3.e.17.w", "h.3.table"):
        assert layout.ignores(name), name
    for name in ("h.1.w", "h.4.w", "h.2.e.x.w", "h.2.v", "h.20.w"):
        assert not layout.ignores(name), name
    assert not family.layout({"size": 1}).ignores("h.2.w")


def test_what_is_beside_has_layers_of_its_own():
    family = replace(
        FAMILY,
        beside=(Weight("v.{}.w", "hidden"), Weight("v.norm", "hidden")),
        sizes=lambda _: {**SIZES, "beside": 3},
    )
    layout = family.layout({"size": 1})
    names = [*(f"v.{number}.w" for number in range(3)), "v.norm"]
    assert [name for rule in layout.beside for name in rule.theirs] == names
    assert list(layout.schema)[-4:] == names
