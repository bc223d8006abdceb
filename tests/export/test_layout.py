"""Tensors of files and our logical tensors that they are made of."""

from megablocks_core.export.layout import Layout, OnDisk

JOINED = OnDisk("gate_up", (6, 4), ("gate", "up"))
EXPERTS = OnDisk("all", (2, 6, 4), ("g0", "u0", "g1", "u1"), stacked=True)


def test_parts_have_one_shape():
    assert JOINED.part_shape == (3, 4)
    assert EXPERTS.part_shape == (3, 4)
    assert OnDisk("down", (2, 4, 3), ("d0", "d1"), stacked=True).part_shape == (4, 3)
    assert OnDisk("norm", (4,), ("norm",)).part_shape == (4,)


def test_a_model_may_have_the_names_of_the_files():
    layout = Layout((JOINED, EXPERTS), {"head": "all"}, ("t.{}",))
    assert layout.named(["gate", "up", "g0", "u0", "g1", "u1"]) == layout
    theirs = layout.named(["gate_up", "all"])
    assert [tensor.parts for tensor in theirs.tensors] == [("gate_up",), ("all",)]
    assert (theirs.ties, theirs.ignored) == (layout.ties, layout.ignored)
    assert (layout.tied_parts, theirs.tied_parts) == ({"head": "g0"}, {"head": "all"})
