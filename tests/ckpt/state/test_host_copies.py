"""Copies of a state are its own, share what it shares, and use one buffer again."""

import torch
from torch import nn

from megablocks_core.ckpt.state.entries import take_apart
from megablocks_core.ckpt.state.host_copies import HostCopies
from megablocks_core.groups import LOCAL


def _values(entries):
    return {share.name: [piece.view.clone() for piece in share.pieces] for share in entries.shares}


def test_what_happens_to_the_state_does_not_reach_the_copy():
    model, options = nn.Linear(3, 2), {"rates": [1.0]}
    state = {"model": model, "odd": torch.arange(7.0)[::2], "options": options}
    entries = take_apart(state, group=LOCAL)
    before = _values(entries)
    copied = HostCopies().take(entries)
    with torch.no_grad():
        model.weight.zero_()
        state["odd"].zero_()
    options["rates"].append(2.0)
    found = _values(copied)
    assert found.keys() == before.keys()
    for name in found:
        assert all(map(torch.equal, found[name], before[name]))
    assert copied.state["options"]["value"] == {"rates": [1.0]}


def test_one_buffer_serves_every_save_and_grows_only_for_a_larger_state():
    copies, sizes = HostCopies(), []
    for length in (10, 10, 4, 10, 400):
        copies.take(take_apart({"x": torch.ones(length)}, group=LOCAL))
        sizes.append((copies.buffer.data_ptr(), copies.buffer.numel()))
    assert len(set(sizes[:4])) == 1
    assert sizes[4][1] == 1600


def test_what_two_names_share_is_copied_once():
    x = torch.ones(1000)
    copies = HostCopies()
    copied = copies.take(take_apart({"a": x, "b": x, "c": x[:10]}, group=LOCAL))
    assert copies.buffer.numel() == 4032 + 64
    first, second, third = (share.pieces[0].view for share in copied.shares)
    assert first.data_ptr() == second.data_ptr() != third.data_ptr()


def test_kinds_of_every_width_and_shape_are_copied():
    state = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bools": torch.tensor([True, False, True]),
        "narrow": torch.randn(5).bfloat16(),
        "crossed": torch.arange(6).view(2, 3).t(),
    }
    copied = HostCopies().take(take_apart(state, group=LOCAL))
    for share in copied.shares:
        want = state[share.name.partition("/")[0]]
        assert [piece.view.dtype for piece in share.pieces] == [want.dtype] * bool(want.numel())
        assert all(torch.equal(piece.view, want) for piece in share.pieces)
