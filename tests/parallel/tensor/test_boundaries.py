"""Hooks at module edges share one message, let parameters stand in, and clean up after errors."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group
from megablocks_core.parallel import tensor_parallelize
from megablocks_core.parallel.tensor.boundaries import (
    EndSumGradients,
    ScatterTokens,
    SharedInput,
    SumGradients,
)
from megablocks_core.testing import ranks


def _world() -> Group:
    return Group.of(dist.group.WORLD)


class _Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.o(self.q(x) + self.k(x))


@ranks(2)
def test_siblings_share_a_copy_only_while_their_parent_runs():
    model = _Siblings()
    tensor_parallelize(model, {"q": "column", "k": "column", "o": "row"}, group=_world())
    (shared,) = model.q._forward_pre_hooks.values()
    x = torch.ones(2, 4, requires_grad=True)
    with CommDebugMode() as traffic:
        model(x).sum().backward()
    assert traffic.get_total_counts() == 2
    with torch.no_grad():
        assert not model.k(x).requires_grad
        model(x)
    assert shared._last is None and not shared.inside
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert shared._last is None and not shared.inside
    # Called by itself a sibling remembers nothing.
    model.q(x).sum().backward()
    assert shared._last is None


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        if x.shape[-1] != 3:
            raise RuntimeError("three features")
        return self.norm(x) * self.scale


def _summing(group, names=("norm.weight", "norm.bias", "scale")):
    model = _Normed().double()
    start = SumGradients(group, names)
    model.register_forward_pre_hook(start)
    model.register_forward_hook(EndSumGradients(start), always_call=True)
    return model


@ranks(1, 2)
def test_parameters_used_on_own_tokens_end_with_the_whole_gradient():
    group = _world()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * group.size, 3, generator=generator, dtype=torch.float64)
    model, whole = _summing(group), _Normed().double()
    with CommDebugMode() as traffic:
        model(x.chunk(group.size)[group.rank]).square().sum().backward()
    whole(x).square().sum().backward()
    assert traffic.get_total_counts() == (group.size > 1)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@ranks(2)
def test_parameters_are_seen_again_after_an_error_and_keep_their_names():
    model = _summing(_world())
    names = list(model.state_dict())
    with pytest.raises(RuntimeError, match="three features"):
        model(torch.ones(2, 4, dtype=torch.float64))
    assert "scale" not in vars(model) and "weight" not in vars(model.norm)
    model(torch.ones(2, 3, dtype=torch.float64))
    assert list(model.state_dict()) == names
    model.requires_grad_(False)
    with CommDebugMode() as traffic:
        model(torch.ones(2, 3, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert traffic.get_total_counts() == 0


@ranks(2)
def test_one_sixteen_bit_gradient_is_summed_in_float32():
    group = _world()
    model = _summing(group, ("scale",)).bfloat16()
    y = model(torch.tensor([[-1.0, 0.0, 1.0]]).bfloat16())
    y.backward(torch.tensor([[0.0, 0.0, 256.0 if group.rank == 0 else 1.0]]).bfloat16())
    exact = 257.0 * y[0, 2].item()
    assert abs(model.scale.grad[2].item() - exact) <= 2.0  # half a last place of bfloat16


def test_copies_and_pickles_of_a_hook_forget_what_was_shared():
    shared = SharedInput(LOCAL)
    shared.begin()
    shared(nn.Identity(), (torch.ones(2),))
    for twin in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert twin is not shared and twin._last is None and twin.group is LOCAL


@ranks(2)
def test_hidden_states_are_found_by_position_and_by_name():
    scatter = ScatterTokens(_world())
    x = torch.arange(8.0).view(1, 4, 2)
    own = x[:, _world().rank * 2 :][:, :2]
    (first, rest), kwargs = scatter(nn.Identity(), (x, 1), {})
    assert torch.equal(first, own) and rest == 1 and kwargs == {}
    args, kwargs = scatter(nn.Identity(), (), {"hidden_states": x, "mask": None})
    assert args == () and torch.equal(kwargs["hidden_states"], own)
    with pytest.raises(ValueError, match="a sequence of 3 tokens must divide evenly"):
        scatter(nn.Identity(), (x[:, :3],), {})


@ranks(2)
def test_a_part_that_fully_shard_cut_on_its_own_is_refused():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    model = nn.Sequential(nn.LayerNorm(4))
    model.register_forward_pre_hook(SumGradients(_world(), ("0.weight", "0.bias")))
    fully_shard(model[0], mesh=mesh["dp"])
    with pytest.raises(
        ValueError, match="a Sequential that is cut must be one unit of fully_shard"
    ):
        model(torch.ones(2, 4))
