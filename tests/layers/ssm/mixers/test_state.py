"""The state of a mixer is two tensors that travel together."""

import copy

import pytest
import torch

from megablocks_core.layers.ssm import MixerState


def test_it_is_a_pair_that_copies_and_cannot_be_assigned():
    state = MixerState(conv=torch.zeros(2, 3, 4), ssm=torch.ones(2, 4, 5))
    conv, ssm = copy.deepcopy(state)
    assert torch.equal(conv, state.conv) and torch.equal(ssm, state.ssm)
    with pytest.raises(AttributeError):
        setattr(state, "conv", conv)  # noqa: B010
