"""Stacks of parameters, changed together and taken apart."""

import torch

from megablocks_core.layers.moe.experts.projections import Projections


def test_each_expert_has_its_own_and_what_is_not_there_stays_so():
    stacked = Projections(
        None, torch.randn(3, 4, 2), torch.randn(3, 2, 4), up_bias=torch.ones(3, 4)
    )
    experts = stacked.unstacked()
    assert len(experts) == 3 and all(expert.gate is None for expert in experts)
    assert torch.equal(experts[2].up, stacked.up[2])
    changed = stacked.each(lambda tensor: 2 * tensor)
    assert changed.down_bias is None and torch.equal(changed.down, 2 * stacked.down)
    assert changed.up_bias is not None and (changed.up_bias == 2).all()
