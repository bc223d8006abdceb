"""Who is Muon's follows from names and shapes; groups bring their own options."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, ShardSpec, mark
from megablocks_core.parallel.muon.groups import (
    ADJUSTMENTS,
    check_numbers,
    is_hidden_matrix,
    muon_groups,
)
from megablocks_core.train import Rule, parameter_groups

_OPTIONS = {"muon": {"lr": 0.1, "momentum": 0.9}, "adamw": {"lr": 0.2, "betas": (0.9, 0.99)}}


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("model.embed_tokens.weight", (9, 4), False),
        ("lm_head.weight", (9, 4), False),
        ("transformer.wte.weight", (9, 4), False),
        ("model.norm.weight", (4,), False),
        ("model.layers.0.mlp.gate_proj.weight", (1, 4), False),
        ("model.layers.0.conv1d.weight", (8, 1, 4), False),
        ("model.layers.0.A_log", (8, 4), False),
        ("model.layers.0.in_proj_bias", (8, 4), False),
        ("model.heads_of_state.weight", (8, 4), True),
    ],
)
def test_the_rule(name, shape, hidden):
    assert is_hidden_matrix(name, shape) == hidden


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 6)
        self.router = nn.Linear(4, 3, bias=False)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.ones(3, 4, 5))})
        mark(self.experts, "up", ShardSpec(0, LOCAL), each="experts.{}.up.weight", expert=True)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def _named(groups):
    return [(group["algorithm"], group["param_names"]) for group in groups]


def test_without_groups_all_that_is_trained_is_in_two():
    groups, members = muon_groups(_Model(), None, _OPTIONS)
    assert _named(groups) == [
        ("muon", ["up.weight", "router.weight", "experts.up"]),
        ("adamw", ["table.weight", "up.bias"]),
    ]
    assert groups[0]["momentum"] == 0.9 and groups[1]["betas"] == (0.9, 0.99)
    assert {member.name: member.layout is not None for member in members.values()} == {
        "table.weight": False,
        "up.weight": True,
        "up.bias": False,
        "router.weight": True,
        "experts.up": True,
    }


def test_groups_by_pattern_bring_their_options():
    rules = [Rule("**.weight", {"lr": 0.5}), Rule("router.*", {"algorithm": "adamw"})]
    model = _Model()
    options = {name: {**kind, "weight_decay": 0.1} for name, kind in _OPTIONS.items()}
    groups, _ = muon_groups(model, parameter_groups(model, {}, rules), options)
    found = {name: (g["algorithm"], g["lr"]) for g in groups for name in g["param_names"]}
    assert found == {
        "table.weight": ("adamw", 0.5),
        "up.weight": ("muon", 0.5),
        "up.bias": ("adamw", 0.2),
        "router.weight": ("adamw", 0.5),
        "experts.up": ("muon", 0.1),
    }


def test_numbers_out_of_range_are_refused():
    check_numbers({"lr": torch.tensor(0.1), "weight_decay": 0.0, "momentum": 0.0})
    for group, rule in (
        ({"lr": -0.1, "momentum": 0.9}, "lr=-0.1"),
        ({"lr": 0.1, "eps": -1.0, "betas": (0.9, 0.9)}, "eps=-1.0"),
        ({"lr": 0.1, "betas": (0.9, 1.0)}, "betas=1.0 must be from 0"),
        ({"lr": 0.1, "momentum": 0.9, "adjust_lr": None}, "adjust_lr=None"),
    ):
        with pytest.raises(ValueError, match=rule):
            check_numbers(group)


def test_the_scales_of_updates():
    found = {name: (scale(9, 4), scale(4, 9)) for name, scale in ADJUSTMENTS.items()}
    assert found["original"] == (1.5, 1.0)
    assert found["match_rms_adamw"] == pytest.approx((0.6, 0.6))
    assert found["none"] == (1.0, 1.0)
