"""State is taken apart into logical tensors and JSON values."""

import pytest
import torch
from torch import nn

from megablocks_core.ckpt.state.entries import kind_of, merge_states, take_apart
from megablocks_core.groups import LOCAL


def test_names_are_logical_and_tied_tensors_come_once():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    net[1].weight = net[0].weight
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(3, 2)).sum().backward()
    sgd.step()
    entries = take_apart(
        {"model": net, "optimizer": sgd, "step": 3, "x": torch.ones(1)}, group=LOCAL
    )
    names = [share.name for share in entries.shares]
    assert [share.name for share in entries.shares if not share.whole] == names[6:9]
    parameters = ["0.weight", "2.weight", "2.bias"]
    buffers = ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    assert names == [f"model/{name}" for name in parameters + buffers] + [
        f"optimizer/model/{name}/momentum_buffer" for name in parameters
    ] + ["x/x"]
    assert {name: entry["kind"] for name, entry in entries.state.items()} == {
        "model": "module", "optimizer": "optimizer", "step": "json", "x": "tensor",
    }  # fmt: skip
    (group,) = entries.state["optimizer"]["value"]["param_groups"]
    assert group["names"] == [f"model/{name}" for name in parameters]
    assert group["values"]["momentum"] == 0.9


def test_states_of_all_ranks_become_one():
    states = [{"a": {"kind": "json", "value": value}} for value in (1, 1, 2)]
    assert merge_states(states[:2]) == states[0]
    with pytest.raises(ValueError, match=r"state\['a'\] must be equal on all ranks: rank 0 has"):
        merge_states(states)
    with pytest.raises(ValueError, match="must have the same names on all ranks: rank 0 has"):
        merge_states([states[0], {}])
    nan = {"a": {"kind": "json", "value": float("nan")}}
    assert merge_states([nan, nan]) == nan


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "../a"])
def test_names_must_be_file_names(name):
    with pytest.raises(ValueError, match="state name"):
        kind_of(name, 1)


@pytest.mark.parametrize("name", ["o.00001", "o-00001-of-00002", "a.b.123456"])
def test_names_that_would_share_a_rank_s_files_are_refused(name):
    with pytest.raises(ValueError, match="must not end as the files of a rank are numbered"):
        kind_of(name, 1)
    assert kind_of(name[:-1] + "x", 1) == "json"
