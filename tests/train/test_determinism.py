"""A step that is not the same twice is found, and the first tensor that tells is named."""

import random

import numpy
import pytest
import torch
from torch import nn

from megablocks_core.groups import Mesh, gather_whole
from megablocks_core.parallel import ColumnParallelLinear, RowParallelLinear, clip_grad_norm_
from megablocks_core.testing import ranks
from megablocks_core.train import assert_deterministic


def small(tp=None):
    torch.manual_seed(0)
    if tp is None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    else:
        model = nn.Sequential(
            ColumnParallelLinear(4, 8, group=tp), RowParallelLinear(8, 3, group=tp)
        )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_of(model, optimizer, noise=lambda: 0.0):
    def step():
        loss = model(torch.ones(6, 4)).square().sum() + noise()
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        return {"loss": loss}

    return step


def everything(model, optimizer):
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [None if t is None else t.clone() for t in [*tensors, *states]]


def test_a_deterministic_step_passes_and_leaves_nothing_behind():
    """With dropout and running statistics, before the first step and after one."""
    model, optimizer = small()
    step, state = step_of(model, optimizer), {"model": model, "optimizer": optimizer}
    for _ in range(2):
        before, generators = everything(model, optimizer), _generators()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert_deterministic(step, state)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is gradient  # it may be a part of a buffer
        for a, b in zip(before, everything(model, optimizer), strict=True):
            assert b is None if a is None else torch.equal(a, b)
        assert generators == _generators()
        step()


def test_a_step_that_ends_in_evaluation_starts_in_training_again():
    model, optimizer = small()
    step = step_of(model, optimizer)

    def train_and_evaluate():
        loss = step()
        model.eval()
        return loss

    assert_deterministic(train_and_evaluate, {"model": model, "optimizer": optimizer})
    assert all(part.training for part in model.modules())


def _generators():
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, numpy.random.get_state()[1].tobytes(), random.getstate()


def test_random_numbers_of_every_default_generator_are_the_same_twice():
    tensor = torch.zeros(3)

    def step():
        tensor.add_(torch.rand(3) + random.random() + numpy.random.rand())
        return tensor.tolist()

    assert_deterministic(step, {"tensor": tensor})
    assert tensor.tolist() == [0.0] * 3


def test_the_first_tensor_that_differs_is_named():
    calls = iter(range(1000))
    model, optimizer = small()
    state = {"model": model, "optimizer": optimizer}
    noisy = nn.Module()
    noisy.forward = lambda x: x + 1e-6 * next(calls)
    deep = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), noisy), nn.Linear(4, 4))
    with pytest.raises(AssertionError, match=r"differ: output of net\.1\.1, float32 \[2, 4\]$"):
        assert_deterministic(lambda: deep(torch.ones(2, 4)), {"net": deep})
    with pytest.raises(AssertionError, match=r"what the step returned, float32 \[2, 4\]$"):
        assert_deterministic(lambda: deep(torch.ones(2, 4)), {"net": deep}, inside=False)
    noise = step_of(model, optimizer, noise=lambda: next(calls))
    with pytest.raises(AssertionError, match=r"what the step returned\.loss, float32 \[\]$"):
        assert_deterministic(noise, state)

    def hidden():
        step_of(model, optimizer)()
        list(model.parameters())[2].grad[3] += next(calls)

    with pytest.raises(AssertionError, match=r"gradient of model\.2\.weight, float32 \[8\]$"):
        assert_deterministic(hidden, state)
    parameter = model[0].bias

    def of_optimizer():
        step_of(model, optimizer)()
        optimizer.state[parameter]["exp_avg"][0] = next(calls)

    with pytest.raises(AssertionError, match=r"optimizer\.state\.1\.exp_avg, float32 \[8\]$"):
        assert_deterministic(of_optimizer, state)


def test_bits_are_compared_not_numbers():
    zero = iter([0.0, -0.0])
    with pytest.raises(AssertionError, match="what the step returned"):
        assert_deterministic(lambda: torch.tensor(next(zero)), {})
    assert_deterministic(lambda: torch.tensor([torch.nan, torch.inf]), {})


def test_a_run_that_does_more_than_the_other_is_found():
    lengths = iter([1, 2])
    with pytest.raises(AssertionError, match=r"only one run has what the step returned\[1\]"):
        assert_deterministic(lambda: [torch.ones(2)] * next(lengths), {})


def test_a_step_that_fails_leaves_the_state_as_it_was():
    tensor = torch.zeros(2)

    def step():
        tensor.add_(1)
        raise KeyError("broken")

    with pytest.raises(KeyError):
        assert_deterministic(step, {"tensor": tensor})
    assert tensor.tolist() == [0.0, 0.0]


def test_states_of_wider_dtype_than_their_parameters_come_back_as_they_were():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["master"] = torch.full((3,), 1 + 2**-20)

    def step():
        optimizer.state[parameter]["master"] *= 2
        parameter.data.copy_(optimizer.state[parameter]["master"])

    assert_deterministic(step, {"optimizer": optimizer, "parameter": parameter})
    assert optimizer.state[parameter]["master"].tolist() == [1 + 2**-20] * 3


def test_only_what_can_be_put_back_is_state():
    with pytest.raises(ValueError, match=r"state\['loader'\] of type list_iterator must be"):
        assert_deterministic(lambda: None, {"loader": iter([1])})


@ranks(1, 2)
def test_all_ranks_raise_where_one_differs():
    tp = Mesh(tp=Mesh().size("dp")).group("tp")
    model, optimizer = small(tp)
    state = {"model": model, "optimizer": optimizer}
    before = gather_whole(model)
    assert_deterministic(step_of(model, optimizer), state, group=tp)
    calls = iter(range(1000))
    last = tp.size - 1

    def noise():
        return next(calls) if tp.rank == last else 0.0

    where = f" on rank {last}" if tp.size > 1 else ""
    with pytest.raises(AssertionError, match=f"differ{where}: what the step returned"):
        assert_deterministic(step_of(model, optimizer, noise), state, group=tp)
    for name, tensor in gather_whole(model).items():
        assert torch.equal(tensor, before[name])
