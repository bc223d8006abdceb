"""Tensors of files and our logical tensors that they are made of."""

import torch

from megablocks_core.export.layout import Layout, Rule
from megablocks_core.export.lazies import lazy
from megablocks_core.export.operations import Join, Split, Stack, Transpose, Unstack

JOINED = Rule({"gate_up": (6, 4)}, ("gate", "up"), (Split((3, 3)),))
EXPERTS = Rule({"all": (2, 6, 4)}, ("g0", "g1", "u0", "u1"), (Split((3, 3), 1), Unstack(2)))
APART = tuple(
    Rule({f"e{index}.{part}": (3, 4)}, (f"ours.{index}.{part}",))
    for index in range(2)
    for part in ("gate", "up")
)
FUSED = Rule(
    {name: (3, 4) for rule in APART for name in rule.theirs},
    ("experts.gate_up_proj",),
    (Join((3, 3)), Stack(2), Transpose(1, 2)),
)


def test_shapes_of_ours_follow_from_theirs():
    assert JOINED.shapes == {"gate": (3, 4), "up": (3, 4)}
    assert EXPERTS.shapes == dict.fromkeys(("g0", "g1", "u0", "u1"), (3, 4))
    assert FUSED.shapes == {"experts.gate_up_proj": (2, 4, 6)}


def test_f_169_orientation_comes_from_the_rule_where_shapes_are_equal():
    rule = Rule({"down": (2, 4, 4)}, ("d0", "d1"), (Transpose(1, 2), Unstack(2)))
    plain = Rule({"down": (2, 4, 4)}, ("d0", "d1"), (Unstack(2),))
    down = torch.arange(32.0).view(2, 4, 4)
    for expert in range(2):
        turned = rule.to_ours([lazy(down)])[f"d{expert}"][...]
        assert torch.equal(turned, down[expert].T)
        assert torch.equal(plain.to_ours([lazy(down)])[f"d{expert}"][...], down[expert])
    ours = list(rule.to_ours([lazy(down)]).values())
    assert torch.equal(rule.to_theirs(ours)["down"][...], down)


def test_a_model_may_have_the_names_of_the_files():
    layout = Layout((JOINED, EXPERTS), {"head": "all"}, ("t.{}",))
    ours = ["gate", "up", "g0", "u0", "g1", "u1"]
    assert layout.named(ours) == layout
    theirs = layout.named(["gate_up", "all"])
    assert [rule.ours for rule in theirs.rules] == [("gate_up",), ("all",)]
    assert (theirs.ties, theirs.ignored) == (layout.ties, layout.ignored)
    assert (layout.tied_parts, theirs.tied_parts) == ({"head": "g0"}, {"head": "all"})


def test_a_model_may_hold_in_one_tensor_what_files_hold_apart():
    layout = Layout((JOINED, *APART), in_memory=(FUSED,))
    assert layout.named([name for rule in layout.rules for name in rule.ours]) == layout
    fused = layout.named(["gate_up", "experts.gate_up_proj"])
    assert fused.rules == (Rule({"gate_up": (6, 4)}, ("gate_up",)), FUSED)
    assert fused.schema == layout.schema


def test_a_model_may_lack_what_is_beside_a_language_model():
    """Files need it all the same, and a model that has a part of it needs all."""
    tower = (Rule({"tower.a": (2,)}, ("tower.a",)), Rule({"tower.b": (2,)}, ("tower.b",)))
    layout = Layout((JOINED,), beside=tower)
    assert list(layout.schema) == ["gate_up", "tower.a", "tower.b"]
    assert layout.order == ["gate", "up", "tower.a", "tower.b"]
    alone = layout.named(["gate", "up"])
    assert (alone.rules, alone.beside, alone.schema) == ((JOINED,), tower, layout.schema)
    part = layout.named(["gate", "up", "tower.b"])
    assert (part.rules, part.beside) == ((JOINED, *tower), ())


def test_tables_that_nobody_reads_are_known():
    layout = Layout((), ignored=("layers.{}.table",))
    assert layout.ignores("layers.12.table")
    assert not layout.ignores("layers.x.table")
