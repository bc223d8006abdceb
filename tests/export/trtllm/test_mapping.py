"""Ranks, their layers and their experts."""

import pytest
import torch

from megablocks_core.export.trtllm.mapping import Mapping


@pytest.mark.parametrize(("layers", "pp"), [(8, 1), (8, 3), (7, 4), (2, 2)])
def test_stages_are_those_of_tensor_split(layers, pp):
    found = [place.layers(layers) for place in Mapping(2, pp).places]
    wanted = [stage.tolist() for stage in torch.arange(layers).tensor_split(pp)]
    assert [list(one) for one in found] == [stage for stage in wanted for _ in range(2)]


def test_ranks_are_numbered_by_stage_then_slice():
    places = Mapping(3, 2).places
    assert [place.rank for place in places] == [0, 1, 2, 3, 4, 5]
    assert [(place.pp_rank, place.tp_rank) for place in places[2:4]] == [(0, 2), (1, 0)]
    assert [place.is_first for place in places] == [True] * 3 + [False] * 3
    assert [place.is_last for place in places] == [False] * 3 + [True] * 3


def test_experts_are_dealt_to_neighbours():
    places = Mapping(4, moe_tp=2, moe_ep=2).places
    assert [list(place.experts(6)) for place in places] == [[0, 1, 2], [3, 4, 5]] * 2
    assert [place.moe_tp_rank for place in places] == [0, 0, 1, 1]
    assert Mapping(4).moe_tp == 4 and Mapping(4, moe_ep=4).moe_tp == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 0}, "tp=0 must be a whole number above 0"),
        ({"pp": True}, "pp=True must be"),
        ({"moe_ep": 2.0}, "moe_ep=2.0 must be"),
        ({"tp": 4, "moe_tp": 1}, "moe_tp=1 times moe_ep=1 must be tp=4"),
        ({"tp": 4, "moe_ep": 3}, "moe_tp=None times moe_ep=3 must be tp=4"),
        ({"tp": 1, "moe_ep": 2}, "times moe_ep=2 must be tp=1"),
    ],
)
def test_mappings_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        Mapping(**given)
