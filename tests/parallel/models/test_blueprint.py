"""What a plan will do to a model is decided, or refused by name, before anything changes."""

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, Group, Segment, ShardSpec
from megablocks_core.parallel import Column
from megablocks_core.parallel.models.blueprint import draw, output_head
from megablocks_core.parallel.tensor.plan import Heads, read_plan
from tests.parallel.tiny_models import tiny_model

_TWO, _FOUR = Group((0, 1)), Group((0, 1, 2, 3))


def _draw(model, plan="auto", *, group=_TWO, sequence_parallel=False):
    styles = read_plan(model, plan)
    return draw(model, styles, group=group, sequence_parallel=sequence_parallel)


class _Attention(nn.Module):
    """Of Llama's kind, with heads of width 4 and a norm of heads."""

    def __init__(self, *, heads=4, key_heads=4, groups=True):
        super().__init__()
        self.head_dim = 4
        if groups:
            self.num_key_value_groups = heads // key_heads
        self.q_proj = nn.Linear(16, heads * 4)
        self.k_proj, self.v_proj = (nn.Linear(16, key_heads * 4) for _ in range(2))
        self.q_norm = nn.LayerNorm(4)
        self.o_proj = nn.Linear(heads * 4, 16)
        self.sinks = nn.Parameter(torch.zeros(heads))


_COLUMNS = ("q_proj", "k_proj", "v_proj")
_PLAN = {
    "q_proj": "column",
    "k_proj": Column(repeat=True),
    "v_proj": Column(repeat=True),
    "q_norm": "replicated",
    "o_proj": "row",
    "sinks": "heads",
}


def test_heads_are_cut_whole_and_key_heads_shared_among_ranks():
    blueprint = _draw(_Attention(key_heads=2), _PLAN, group=_FOUR)
    assert blueprint.specs["q_proj.weight"] == ShardSpec(0, _FOUR, (Segment(16),))
    assert blueprint.specs["k_proj.bias"] == ShardSpec(0, _FOUR, (Segment(8, parts=2),))
    assert blueprint.specs["o_proj.weight"] == ShardSpec(1, _FOUR, (Segment(16),))
    assert blueprint.specs["sinks"] == ShardSpec(0, _FOUR, (Segment(4),))
    assert "o_proj.bias" not in blueprint.specs
    assert blueprint.summed == ["q_norm.weight", "q_norm.bias"]
    assert blueprint.attributes == [("", "num_key_value_groups", 1)]
    assert blueprint.siblings() == {"": ["q_proj", "k_proj", "v_proj"]}
    assert list(blueprint.shared().values()) == [
        ["k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"]
    ]


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (_Attention(heads=6, key_heads=6), {}, "6 units of 4 output .* no cut may go through"),
        (_Attention(key_heads=1), {"k_proj": "column"}, "1 units of 4"),
        (_Attention(key_heads=1, groups=False), {}, "attention of Llama's kind"),
        (_Attention(), {"q_proj": Column(unit=3)}, "unit=3 must divide 16"),
        (_Attention(), {"q_proj": Column(segments=(5,))}, "must add up to its 16"),
        (_Attention(), {"q_proj": Column(segments=(0,))}, "must add up to its 16"),
        (_Attention(), {"q_norm": "column"}, "must name an nn.Linear, not a LayerNorm"),
        (_Attention(), {"q_norm": "vocab"}, "must name an nn.Embedding, not a LayerNorm"),
        (_Attention(), {"sinks": "row"}, r"cannot cut a parameter of shape \(4,\)"),
        (_Attention(heads=6, key_heads=6), dict.fromkeys(_COLUMNS, "whole"), "length"),
    ],
)
def test_cuts_that_cannot_be_are_refused(model, change, words):
    with pytest.raises(ValueError, match=words):
        _draw(model, {**_PLAN, **change}, group=_FOUR)


def test_a_parameter_beside_cut_projections_must_be_named():
    plan = {name: style for name, style in _PLAN.items() if name != "q_norm"}
    with pytest.raises(ValueError, match="plan must name q_norm.weight"):
        _draw(_Attention(), plan)
    assert _draw(_Attention(), {**plan, "q_norm": "whole"}).summed == []
    # Under sequence parallelism it sees this rank's tokens, and is summed.
    assert "q_norm.weight" in _draw(_Attention(), plan, sequence_parallel=True).summed


def test_tied_names_are_cut_alike_or_not_at_all():
    model = tiny_model("llama", tied=True)
    blueprint = _draw(model)
    assert blueprint.ties == [("model.embed_tokens.weight", "lm_head.weight")]
    with pytest.raises(ValueError, match="lm_head.weight is tied to model.embed_tokens.weight"):
        _draw(model, {"model.embed_tokens": "vocab"})


def test_tokens_are_cut_inside_the_layers_of_a_transformers_model():
    model = tiny_model("qwen3")
    blueprint = _draw(model, sequence_parallel=True)
    assert (blueprint.layers, blueprint.final_norm) == ("model.layers", "model.norm")
    assert blueprint.slices_layers and not blueprint.slices_all
    assert blueprint.on_own_tokens("model.norm.weight")
    assert not blueprint.on_own_tokens("model.embed_tokens")
    blocks = blueprint.summed_by_block()
    assert set(blocks) == {"model.layers.0", "model.layers.1", "model.norm"}
    assert "model.layers.0.self_attn.q_norm.weight" in blocks["model.layers.0"]
    assert "model.layers.0.self_attn" in blueprint.siblings()
    assert output_head(model) == "lm_head" and output_head(nn.Linear(2, 2)) == ""


def test_blocks_that_mix_tokens_must_see_all_of_them():
    mlp = {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}
    attention = {f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"}
    model = tiny_model("llama")
    for plan in (mlp, {**attention, "model.layers.*.self_attn.o_proj": "whole"}):
        with pytest.raises(ValueError, match=r"cuts model.layers.0.self_attn, which mixes tokens"):
            _draw(model, plan, sequence_parallel=True)
    # A block that works token by token may stay whole.
    _draw(model, {**attention, "model.layers.*.self_attn.o_proj": "row"}, sequence_parallel=True)


def test_a_transformers_model_without_known_layers_has_no_sequence_parallelism():
    model = tiny_model("llama")
    model._pp_plan = {"model.embed_tokens": (["input_ids"], ["inputs_embeds"])}
    with pytest.raises(ValueError, match="whose _pp_plan names no list of layers"):
        _draw(model, sequence_parallel=True)


def test_what_would_differ_from_one_process_is_refused():
    with pytest.raises(ValueError, match=r'"whole" is used on this rank\'s tokens'):
        _draw(_Attention(), {**_PLAN, "q_norm": "whole"}, sequence_parallel=True)
    model = tiny_model("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match="self_attn.attention_dropout=0.1 must be 0"):
        _draw(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"1.p=0.5 must be 0"):
        _draw(model, {"0": "column"})
    assert _draw(model, {"0": "column"}, group=LOCAL).specs


def test_a_module_of_per_head_parameters_is_cut_by_its_name():
    model = nn.ModuleDict({"gates": nn.LayerNorm(4)})
    blueprint = draw(model, {"gates": Heads()}, group=_TWO, sequence_parallel=False)
    assert set(blueprint.specs) == {"gates.weight", "gates.bias"}
