"""The selection bias follows the load of all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megablocks_core.groups import Mesh
from megablocks_core.layers.moe.routers import route_top_k, update_selection_bias
from megablocks_core.testing import ranks

COUNTS = torch.tensor([6, 2, 0, 0])


@pytest.mark.parametrize(
    "centred, steps",
    [(False, [-1.0, 0, 1, 1]), (True, [-1.25, -0.25, 0.75, 0.75])],
)
def test_f065_a_step_is_the_sign_of_mean_less_count(centred, steps):
    bias = torch.zeros(4)
    update_selection_bias(bias, COUNTS, rate=1e-3, centred=centred)
    assert_close(bias, 1e-3 * torch.tensor(steps))
    logits = torch.randn(20, 4)
    choices = [
        route_top_k(logits, top_k=2, selection_bias=each).indices
        for each in (bias, 1e-3 * torch.tensor([-1.0, 0, 1, 1]))
    ]
    assert torch.equal(*choices)


@ranks(2)
def test_counts_are_those_of_all_ranks_and_stay_as_they_are():
    world = Mesh().group("dp")
    own = COUNTS.flip(0) if dist.get_rank() else COUNTS  # together 6, 2, 2, 6
    bias, kept = torch.zeros(4), own.clone()
    update_selection_bias(bias, own, rate=0.5, group=world)
    assert bias.tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert torch.equal(own, kept)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="tokens_per_expert of shape"):
        update_selection_bias(torch.zeros(3), COUNTS, rate=0.1)
    with pytest.raises(ValueError, match="rate=-1"):
        update_selection_bias(torch.zeros(4), COUNTS, rate=-1)
