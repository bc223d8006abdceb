"""Nested state dicts become the entries that a save of the same objects has."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from megablocks_core import ckpt
from megablocks_core.ckpt.places.places import place_of
from megablocks_core.ckpt.tools.checkpoint import read_whole
from megablocks_core.ckpt.tools.dcp_names import DcpCheckpoint
from megablocks_core.ckpt.tools.dcp_reading import DcpFolder
from megablocks_core.ckpt.tools.opening import open_checkpoint
from tests.ckpt.tools.saves import quiet_save, save_dcp, state_of, trained


def opened(path):
    return DcpCheckpoint(DcpFolder(place_of(path)))


def saved(values, path):
    quiet_save(values, path)
    return opened(path)


def test_the_same_names_shapes_and_values_as_a_save_of_ours(tmp_path):
    model, optimizer = trained()
    save_dcp(tmp_path / "dcp", model, optimizer, ema=torch.ones(3))
    ckpt.save(tmp_path / "ours", {**state_of(model, optimizer), "ema": torch.ones(3)})
    one, other = opened(tmp_path / "dcp"), open_checkpoint(tmp_path / "ours")
    assert one.tensors == other.tensors
    del other.state["run"]["value"]["empty"]  # torch leaves it out
    assert one.state == other.state
    for name in one.tensors:
        assert torch.equal(read_whole(one, name), read_whole(other, name))


def test_a_flattened_optimizer_is_the_same(tmp_path):
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    one = saved({"model": weights, "optimizer": moments}, tmp_path / "flat")
    save_dcp(tmp_path / "nested", model, optimizer)
    other = opened(tmp_path / "nested")
    assert one.tensors == other.tensors
    groups, others = (x.state["optimizer"]["value"]["param_groups"] for x in (one, other))
    assert [group["values"] for group in groups] == [group["values"] for group in others]
    assert [set(group["names"]) for group in groups] == [set(group["names"]) for group in others]


def test_of_names_with_dots_the_longest_is_meant(tmp_path):
    values = {
        "m": {"w": torch.ones(1), "w.x": torch.ones(1)},
        "o": {"state.w.x.v": torch.ones(1), "state.w.v": torch.ones(1)},
    }
    assert list(saved(values, tmp_path / "c").tensors) == ["m/w", "m/w.x", "o/m/w.x/v", "o/m/w/v"]


def test_a_flat_state_dict_is_the_model(tmp_path):
    one = saved(nn.Sequential(nn.Linear(2, 3)).state_dict(), tmp_path / "c")
    assert one.state == {"model": {"kind": "module"}}
    assert list(one.tensors) == ["model/0.weight", "model/0.bias"]


def test_tensors_of_their_own_stay_so(tmp_path):
    one = saved({"ema": torch.ones(2), "mask": torch.ones(3)}, tmp_path / "c")
    assert one.state == {"ema": {"kind": "tensor"}, "mask": {"kind": "tensor"}}


def test_learning_rates_that_are_tensors(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_dcp(tmp_path / "dcp", model, optimizer)
    ckpt.save(tmp_path / "ours", {"model": model, "optimizer": optimizer})
    one, other = opened(tmp_path / "dcp"), open_checkpoint(tmp_path / "ours")
    assert one.tensors == other.tensors
    assert one.state["optimizer"] == other.state["optimizer"]


def test_numbers_in_an_optimizer_are_kept(tmp_path):
    values = {
        "m": {"w": torch.ones(2)},
        "o": {"state": {"w": {"step": 3, "v": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]},
    }
    one = saved(values, tmp_path / "c")
    assert one.state["o"]["value"] == {
        "param_groups": [{"names": ["m/w"], "values": {}}],
        "state": {"m/w": {"step": 3}},
    }
    assert list(one.tensors) == ["m/w", "o/m/w/v"]


def test_values_that_look_like_an_optimizer_are_json(tmp_path):
    one = saved({"s": {"state": 3}, "x": torch.ones(1), "t": {"values": (1, [2])}}, tmp_path / "c")
    assert one.state["s"] == {"kind": "json", "value": {"state": 3}}
    assert one.state["t"] == {"kind": "json", "value": {"values": [1, [2]]}}
    assert one.state["x"] == {"kind": "tensor"} and list(one.tensors) == ["x/x"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a b": {"w": torch.ones(1)}}, "entry 'a b', which must be letters"),
        ({"o.00000": {"w": torch.ones(1)}}, "'o.00000', .* as the files of a rank"),
        ({"m": {"w": torch.ones(1), "n": 3}}, "'m.n' is no tensor, but stands among the tensors"),
        ({"s": {1, 2}, "x": torch.ones(1)}, "'s' of type set must be"),
        (
            {"m": {"w": torch.ones(1)}, "o": {"state": {0: {"v": torch.ones(1)}}}},
            "numbers its parameters; save it with .*get_optimizer_state_dict",
        ),
        (
            {"m": {"w": torch.ones(1)}, "o": {"state": {"x": {"v": torch.ones(1)}}}},
            "state of 'x', which must be a tensor of one module beside it, not of 0",
        ),
        (
            {
                "m": {"w": torch.ones(1)},
                "n": {"w": torch.ones(1)},
                "o": {"state": {"w": {"v": torch.ones(1)}}},
            },
            "state of 'w', .* not of 2",
        ),
        (
            {"m": {"w": torch.ones(1)}, "o": {"state.x.v": torch.ones(1)}},
            "'state.x.v' is of no tensor of a module",
        ),
        ({"m": {"w": torch.ones(1)}, "o": {"state": torch.ones(1)}}, "where a dict should be"),
        ({"m": {"w": torch.ones(1)}, "o": {"param_groups": 3}}, "'3' where a dict should be"),
    ],
)
def test_what_has_no_place_is_named(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        saved(values, tmp_path / "c")
