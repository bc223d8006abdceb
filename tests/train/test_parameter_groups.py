"""Every trained parameter is in one group, chosen by its logical name and shape at any cut."""

import copy

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, Mesh, ShardSpec, gather_whole, mark
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.testing import ranks
from megablocks_core.train import Rule, decays, parameter_groups


def decoder(*, hidden=16, mesh=None, tied=True, device=None):
    spec = DecoderSpec(
        vocab_size=24,
        hidden_size=hidden,
        ffn_size=2 * hidden,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
        attention_bias="qkv",
        tied=tied,
    )
    torch.manual_seed(0)
    return Decoder(spec, mesh=mesh, device=device, dtype=torch.float64)


class Odd(nn.Module):
    """Parameters of a state-space layer and of stacked experts, and a router."""

    def __init__(self):
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 2))
        self.dt_bias = nn.Parameter(torch.ones(4, 1))
        self.conv1d = nn.Conv1d(4, 4, 3, groups=4)
        self.router = nn.Linear(4, 2, bias=False)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.ones(2, 6, 4))
        self.experts.up_scale = nn.Parameter(torch.ones(2, 6))
        mark(self.experts, "up_proj", each="experts.{}.up_proj.weight", expert=True)
        mark(self.experts, "up_scale", each="experts.{}.up_proj.scale", expert=True)


def options_by_name(groups):
    found = {}
    for group in groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        assert len(group["params"]) == len(group["param_names"])
        for name in group["param_names"]:
            assert name not in found
            found[name] = options
    return found


def test_norms_and_biases_do_not_decay_and_a_tied_weight_comes_once():
    model = decoder()
    groups = parameter_groups(model, {"lr": 1.0, "weight_decay": 0.1})
    found = options_by_name(groups)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert "model.embed_tokens.weight" in found and "lm_head.weight" not in found
    for name, options in found.items():
        plain = name.endswith("bias") or "norm" in name
        assert options == {"lr": 1.0, "weight_decay": 0.0 if plain else 0.1}, name
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(map(id, model.parameters()))
    assert len(groups) == 2


def test_state_space_vectors_do_not_decay_whatever_their_shape():
    found = options_by_name(parameter_groups(Odd(), {"weight_decay": 0.1}))
    decayed = {name for name, options in found.items() if options["weight_decay"]}
    assert decayed == {"conv1d.weight", "router.weight", "experts.up_proj"}
    assert decays("layers.0.mixer.D", (4, 2)) is False and decays("D.weight", (4, 2)) is True
    assert decays("experts.gate_up_proj_bias", (4, 2)) is False


def test_rules_choose_by_name_and_logical_shape_and_later_ones_win():
    rules = [
        Rule("**.weight", {"lr": 0.5}, shape=lambda shape: shape == (4, 1, 3)),
        Rule("router.*", {"lr": 0.1, "weight_decay": 0.0}),
        Rule("**", {"lr": 0.25}, shape=lambda shape: shape == (6, 4)),  # one expert's
        Rule("rout*.weight", {"lr": 0.2}),
        Rule("shared.**", {"lr": 9.0}, needed=False),
    ]
    found = options_by_name(parameter_groups(Odd(), {"lr": 1.0, "weight_decay": 0.1}, rules))
    assert {name: o["lr"] for name, o in found.items() if o["lr"] != 1.0} == {
        "conv1d.weight": 0.5,
        "router.weight": 0.2,
        "experts.up_proj": 0.25,
    }
    assert found["router.weight"]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("pattern", "name", "chosen"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.**.c", "a.b.b.c", True),
        ("**.c", "c", False),
        ("**c", "a.c", True),
        ("a.b", "axb", False),
        ("*", "a.b", False),
        ("**", "a.b", True),
    ],
)
def test_a_star_stands_within_a_step_and_two_for_any_part(pattern, name, chosen):
    assert Rule(pattern, {}).chooses(name, ()) is chosen


def test_frozen_parameters_are_left_out():
    model = decoder()
    model.model.embed_tokens.weight.requires_grad_(False)
    rules = [Rule("**.embed_tokens.weight", {"lr": 2.0})]  # chooses, though nothing is trained
    assert "model.embed_tokens.weight" not in options_by_name(parameter_groups(model, {}, rules))
    with pytest.raises(ValueError, match="must have a parameter that is trained"):
        parameter_groups(model.requires_grad_(False), {})


def test_a_rule_that_chooses_nothing_is_refused():
    with pytest.raises(ValueError, match=r"rule 'lm_head\.\*' must choose at least one"):
        parameter_groups(decoder(), {}, [Rule("lm_head.*", {"lr": 1.0})])
    with pytest.raises(ValueError, match="must choose"):
        parameter_groups(decoder(), {}, [Rule("**", {}, shape=lambda shape: len(shape) == 9)])


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adafactor", "NAdam", "RMSprop"])
def test_any_optimizer_of_torch_takes_the_groups_and_saves_their_names(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = parameter_groups(model, {"lr": 0.1, "weight_decay": 0.01})
    optimizer = getattr(torch.optim, kind)(groups)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()["param_groups"]
    names = [["0.weight"], ["0.bias", "1.weight", "1.bias"]]
    assert [group["param_names"] for group in saved] == names
    assert [group["weight_decay"] for group in saved] == [0.01, 0.0]


@ranks(1, 2)
def test_a_cut_over_ranks_changes_no_group():
    mesh = Mesh(tp=Mesh().size("dp"))
    base = decoder(hidden=8, device="meta")
    rules = [Rule("**", {"lr": 0.5}, shape=lambda shape: shape == (8, 16))]  # keys and values
    for mup in (None, base):
        whole, cut = (
            parameter_groups(
                decoder(mesh=each), {"lr": 1.0, "weight_decay": 0.1}, rules, mup_base=mup
            )
            for each in (None, mesh)
        )
        assert options_by_name(cut) == options_by_name(whole)
        assert str(cut) == str(whole)


@ranks(1, 2)
def test_a_step_with_groups_is_that_of_one_process():
    mesh = Mesh(tp=Mesh().size("dp"))
    after = []
    for where in (None, mesh):
        model = decoder(mesh=where)
        rules = [Rule("**.embed_tokens.*", {"lr": 0.2})]
        optimizer = torch.optim.SGD(
            parameter_groups(model, {"lr": 0.1, "weight_decay": 0.5}, rules)
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after.append(gather_whole(model))
    for name, tensor in after[0].items():
        torch.testing.assert_close(after[1][name], tensor, rtol=1e-12, atol=0)


@ranks(2)
def test_a_cut_by_fsdp_changes_no_group():
    from torch.distributed.fsdp import fully_shard  # a second's import, for this test alone

    options, base = {"lr": 1.0, "weight_decay": 0.1}, decoder(hidden=8, device="meta")
    whole = parameter_groups(decoder(), options, mup_base=base)
    model = decoder()
    fully_shard(model)
    cut = parameter_groups(model, options, mup_base=base)
    assert options_by_name(cut) == options_by_name(whole) and str(cut) == str(whole)


def test_mup_scales_matrices_by_their_inputs():
    base = decoder(hidden=8, tied=False, device="meta")
    model = decoder(hidden=32, tied=False)
    groups = parameter_groups(model, {"lr": 1.0, "weight_decay": 0.1}, mup_base=base)
    found = options_by_name(groups)
    for name, options in found.items():
        vector = name.endswith("bias") or "norm" in name
        width = 1.0 if vector or "embed" in name else 4.0
        decay = 0.0 if vector else 0.1 * width
        assert options == {"lr": 1.0 / width, "weight_decay": decay}, name
    tied = parameter_groups(decoder(hidden=32), {"lr": 1.0}, mup_base=decoder(hidden=8))
    assert options_by_name(tied)["model.embed_tokens.weight"]["lr"] == 1.0
    same = parameter_groups(model, {"lr": 1.0}, mup_base=copy.deepcopy(model))
    assert {options["lr"] for options in options_by_name(same).values()} == {1.0}


def test_mup_needs_the_same_model_and_a_rate():
    with pytest.raises(ValueError, match=r"different: \['lm_head.weight'\]"):
        parameter_groups(decoder(), {"lr": 1.0}, mup_base=decoder(tied=False))
    with pytest.raises(ValueError, match="must have an lr for mup_base to divide"):
        parameter_groups(decoder(), {}, mup_base=decoder())


def test_mup_keeps_the_change_of_the_outputs_at_any_width():
    """The coordinate check: one Adam step moves a hidden layer's output alike at every width."""

    def change(hidden, *, mup):
        torch.manual_seed(0)
        build = [nn.Sequential(nn.Linear(8, n), nn.Linear(n, n)) for n in (64, hidden)]
        base, model = build[0], build[1].double()
        options = {"lr": 0.01, "weight_decay": 0.0}
        groups = parameter_groups(model, options, mup_base=base if mup else None)
        optimizer = torch.optim.Adam(groups)
        x = torch.randn(4, 8, dtype=torch.float64)
        hidden_before = model[0](x).detach()
        before = model[1](hidden_before)
        before.square().mean().backward()
        optimizer.step()
        return (model[1](hidden_before) - before).abs().mean().item()

    assert change(1024, mup=True) == pytest.approx(change(64, mup=True), rel=0.4)
    assert change(1024, mup=False) > 3 * change(64, mup=False)


def test_the_table_shows_what_is_where():
    table = str(parameter_groups(decoder(), {"lr": 0.1, "weight_decay": 0.1}))
    head, *rows = table.splitlines()
    assert head.split() == ["tensors", "elements", "lr", "weight_decay", "parameters"]
    assert len(rows) == 2
    assert rows[0].split()[:4] == ["15", "4,992", "0.1", "0.1"]
    assert "model.layers.*.self_attn.q_proj.weight" in rows[0]
    assert "model.norm.weight" in rows[1] and "model.layers.0" not in table


def test_the_elements_of_the_table_are_those_of_the_whole_model():
    layer = nn.Linear(4, 6, bias=False)
    mark(layer, "weight", ShardSpec(0, LOCAL))
    assert " 24 " in str(parameter_groups(layer, {"lr": 1.0}))


@pytest.mark.parametrize("name", ["params", "param_names"])
def test_options_that_would_replace_what_a_group_holds_are_refused(name):
    with pytest.raises(ValueError, match=f"options=.* must not have '{name}'"):
        Rule("**.weight", {"lr": 0.1, name: []})
    with pytest.raises(ValueError, match=f"options=.* must not have '{name}'"):
        parameter_groups(nn.Linear(2, 2), {"lr": 0.1, name: []})
