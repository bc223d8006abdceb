"""Ranges of gradients hang on their parameters, and on no deep copy of them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megablocks_core.groups import LOCAL, GradientShard, gradient_shard, set_gradient_shard


def _parameter():
    parameter = nn.Parameter(torch.zeros(2, 3))
    set_gradient_shard(parameter, GradientShard(torch.arange(4.0), 2, LOCAL))
    return parameter


def test_a_shard_is_found_on_its_parameter_until_it_is_taken_away():
    parameter = _parameter()
    shard = gradient_shard(parameter)
    assert shard is not None
    assert shard.tensor.tolist() == [0, 1, 2, 3]
    assert (shard.start, shard.group) == (2, LOCAL)
    set_gradient_shard(parameter, None)
    set_gradient_shard(parameter, None)
    assert gradient_shard(parameter) is None


def test_a_parameter_without_one_has_none():
    assert gradient_shard(nn.Parameter(torch.zeros(2))) is None


def test_a_shard_may_be_empty_at_the_end():
    parameter = nn.Parameter(torch.zeros(3))
    set_gradient_shard(parameter, GradientShard(torch.zeros(0), 3, LOCAL))
    shard = gradient_shard(parameter)
    assert shard is not None
    assert shard.tensor.shape == (0,)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda parameter: pickle.loads(pickle.dumps(parameter)),
        lambda parameter: _saved(parameter),
    ],
)
def test_deep_copies_and_pickles_have_no_shard(copied):
    parameter = _parameter()
    assert gradient_shard(copied(parameter)) is None
    assert gradient_shard(parameter) is not None


def test_a_copied_module_has_no_shards():
    module = nn.Linear(2, 2)
    set_gradient_shard(module.weight, GradientShard(torch.zeros(4), 0, LOCAL))
    assert gradient_shard(copy.deepcopy(module).weight) is None
    module.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert gradient_shard(module.weight) is not None


def test_in_grad_something_stands_in_that_cannot_be_read():
    parameter = _parameter()
    assert parameter.grad is not None and parameter.grad.shape == (2, 3)
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_([parameter], 1.0)
    set_gradient_shard(parameter, None)
    assert parameter.grad is None


def test_who_drops_grad_drops_the_shard():
    parameter = _parameter()
    parameter.grad = None
    assert gradient_shard(parameter) is None


def test_a_gradient_that_is_there_stays():
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = gradient = torch.ones(2, 3)
    set_gradient_shard(parameter, GradientShard(torch.zeros(4), 0, LOCAL))
    set_gradient_shard(parameter, None)
    assert parameter.grad is gradient


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_what_stands_in_has_the_dtype_that_gradients_have(kind):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad_dtype = kind
    set_gradient_shard(parameter, GradientShard(torch.zeros(2), 0, LOCAL))
    assert parameter.grad.dtype == kind


@pytest.mark.parametrize(
    ("tensor", "start", "rule"),
    [
        (torch.zeros(2, 2), 0, r"shape \(2, 2\) must have one dimension"),
        (torch.zeros(4), 3, "start=3 and 4 elements must be a range of a parameter of 6"),
        (torch.zeros(4), -1, "start=-1"),
    ],
)
def test_what_is_no_range_is_refused(tensor, start, rule):
    parameter = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=rule):
        set_gradient_shard(parameter, GradientShard(tensor, start, LOCAL))


def test_the_group_must_be_one():
    parameter = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="must be a Group"):
        set_gradient_shard(parameter, GradientShard(torch.zeros(1), 0, None))


def _saved(parameter):
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
