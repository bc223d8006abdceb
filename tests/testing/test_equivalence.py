"""``assert_parallel_equivalence`` passes right modules and names what is wrong in others."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megablocks_core.groups import (
    Mesh,
    Segment,
    ShardSpec,
    all_gather_to,
    copy_to,
    gather_from,
    mark,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from megablocks_core.testing import assert_parallel_equivalence, ranks


class Block(nn.Module):
    """Norm on each rank's tokens, packed gate|up column product, row product: five collectives."""

    def __init__(self, hidden, ffn, group, tokens=slice(None)):
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(torch.rand(hidden))
        self.up = nn.Parameter(torch.randn(2 * ffn // group.size, hidden))
        self.down = nn.Parameter(torch.randn(hidden, ffn // group.size))
        self.bias = nn.Parameter(torch.randn(hidden))
        mark(self, "up", ShardSpec(0, group, (Segment(ffn), Segment(ffn))))
        mark(self, "down", ShardSpec(1, group))

    def forward(self, x_TH):
        scale, bias = copy_to(self.scale, self.bias, group=self.group)
        x_tH = scatter_to(x_TH, dim=0, group=self.group)
        h_TH = all_gather_to(x_tH * scale, dim=0, group=self.group)
        gate, up = (h_TH @ self.up.T).chunk(2, dim=-1)
        y_tH = reduce_scatter_to((gate.tanh() * up) @ self.down.T, dim=0, group=self.group)
        return gather_from(y_tH + bias, dim=0, group=self.group)


class Column(nn.Module):
    """A product whose outputs stay cut."""

    def __init__(self, group, features=6):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(features // group.size, 4))
        mark(self, "weight", ShardSpec(0, group))

    def forward(self, x):
        return copy_to(x, group=self.group) @ self.weight.T


class Row(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(4, 6 // group.size))
        mark(self, "weight", ShardSpec(1, group))

    def forward(self, x):
        return reduce_from(x @ self.weight.T, group=self.group)


class Replicated(nn.Module):
    """Each rank has its own tokens and the whole weight; gradients are summed afterwards."""

    def __init__(self, group):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, scale=None):
        return self.linear(x) if scale is None else self.linear(x) * scale


def _world():
    return Mesh(tp=dist.get_world_size()).group("tp")


def _squares(y):
    return (y * y).sum()


def _rows(group):
    def split(nest):
        if isinstance(nest, torch.Tensor):
            return nest.chunk(group.size)[group.rank]
        return {name: split(x) for name, x in nest.items()}

    return split


def _sum_gradients(group):
    def reduce(module):
        for parameter in module.parameters():
            parameter.grad = group.all_reduce(parameter.grad)

    return reduce


X_TH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@ranks(1, 2, 4)
def test_a_right_block_passes():
    assert_parallel_equivalence(
        lambda group: Block(4, 12, group), X_TH, group=_world(), loss=_squares
    )


@ranks(2)
def test_float32_is_compared_by_norm():
    assert_parallel_equivalence(
        lambda group: Block(4, 12, group), X_TH, group=_world(), loss=_squares, dtype=torch.float32
    )


@ranks(2)
def test_another_tolerance_can_be_given():
    def build(group):
        error = 1e-6 if group.size > 1 else 0.0
        return nn.Sequential(Block(4, 12, group), nn.LeakyReLU(1 + error))

    call = partial(assert_parallel_equivalence, build, X_TH, group=_world(), loss=_squares)
    call(tolerance=1e-4)
    with pytest.raises(AssertionError, match="output: largest error .* allowed"):
        call()


@ranks(1, 2)
def test_cut_outputs_are_joined_and_the_loss_sees_the_whole_of_them():
    group = _world()
    assert_parallel_equivalence(
        Column,
        (X_TH,),
        group=group,
        loss=lambda y: (y * y).mean() * y.shape[-1],
        join=lambda y: gather_from(y, dim=-1, group=group),
    )


@ranks(2)
def test_a_loss_may_be_a_sum_over_the_ranks_outputs():
    group = _world()
    assert_parallel_equivalence(
        Column,
        X_TH,
        group=group,
        loss=_squares,
        join=lambda y: torch.cat(group.all_gather(y.T.contiguous())).T,
    )


@ranks(1, 2)
def test_split_inputs_and_reduced_gradients():
    group = _world()
    assert_parallel_equivalence(
        Replicated,
        {"x": X_TH, "scale": X_TH[:, :1]},
        group=group,
        loss=_squares,
        split=_rows(group),
        join=lambda y: torch.cat(group.all_gather(y)),
        reduce=_sum_gradients(group),
    )


@ranks(2)
def test_features_that_are_split_by_column():
    group = _world()
    assert_parallel_equivalence(
        Row,
        torch.randn(5, 6),
        group=group,
        loss=_squares,
        split=lambda x: x.chunk(group.size, -1)[group.rank],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@ranks(2)
def test_a_gradient_that_was_not_summed_is_named_with_its_error():
    group = _world()
    with pytest.raises(AssertionError, match="rank 1: gradient of linear.weight: largest error"):
        assert_parallel_equivalence(
            Replicated,
            X_TH,
            group=group,
            loss=_squares,
            split=_rows(group),
            join=lambda y: torch.cat(group.all_gather(y)),
        )


@ranks(2)
def test_what_is_wrong_on_one_rank_is_raised_on_all():
    group = _world()

    class WrongOnOne(Replicated):
        def forward(self, x):
            return self.linear(x) * (1 + 1e-9 * group.rank)

    def build(of):
        return WrongOnOne(of) if of.size > 1 else Replicated(of)

    with pytest.raises(AssertionError) as caught:
        assert_parallel_equivalence(build, X_TH, group=group, loss=_squares)
    assert "rank 1: output: " in str(caught.value)
    assert "rank 0: " not in str(caught.value)


@ranks(2)
def test_a_missing_gradient_is_named():
    class Forgets(Replicated):
        def forward(self, x):
            return x @ self.linear.weight.detach().T + self.linear.bias

    def build(of):
        return Forgets(of) if of.size > 1 else Replicated(of)

    with pytest.raises(AssertionError, match=r"gradient of linear\.weight: missing here"):
        assert_parallel_equivalence(build, X_TH, group=_world(), loss=_squares)


@ranks(2)
def test_an_input_gradient_is_compared():
    class Detaches(Replicated):
        def forward(self, x):
            return self.linear(x.detach())

    def build(of):
        return Detaches(of) if of.size > 1 else Replicated(of)

    with pytest.raises(AssertionError, match="gradient of input"):
        assert_parallel_equivalence(build, X_TH, group=_world(), loss=_squares)


@ranks(2)
def test_a_buffer_is_compared_after_the_step():
    class Counts(Replicated):
        def forward(self, x):
            self.steps += 1
            return self.linear(x)

    def build(of):
        return Counts(of) if of.size > 1 else Replicated(of)

    with pytest.raises(AssertionError, match="one step later steps"):
        assert_parallel_equivalence(build, X_TH, group=_world(), loss=_squares)


@ranks(2)
def test_other_whole_shapes_are_named():
    with pytest.raises(AssertionError, match=r"whole weight: shape \(6, 4\) instead of \(8, 4\)"):
        assert_parallel_equivalence(
            lambda group: Column(group, features=6 if group.size > 1 else 8),
            X_TH,
            group=_world(),
            loss=_squares,
        )


@ranks(1, 2)
def test_the_same_start_can_be_required():
    group = _world()

    def check():
        assert_parallel_equivalence(
            Column,
            X_TH,
            group=group,
            loss=_squares,
            join=lambda y: gather_from(y, dim=-1, group=group),
            same_start=True,
        )

    if group.size == 1:
        check()
    else:
        with pytest.raises(AssertionError, match="rank 1: initial weight: other bits"):
            check()


@dataclass
class Output:
    logits: torch.Tensor
    losses: dict


@ranks(2)
def test_every_tensor_of_a_nest_of_outputs_is_compared():
    class Nested(Replicated):
        wrong = 0.0

        def forward(self, x):
            y = self.linear(x)
            return Output(y, {"aux": (y.sum() + self.wrong, 3)})

    class Wrong(Nested):
        wrong = 1e-3

    def check(parallel):
        assert_parallel_equivalence(
            lambda group: parallel(group) if group.size > 1 else Nested(group),
            X_TH,
            group=_world(),
            loss=lambda y: _squares(y.logits),
        )

    check(Nested)
    with pytest.raises(AssertionError, match=r"output\.losses\['aux'\]\[0\]: largest error 0.001"):
        check(Wrong)


@ranks(2)
def test_outputs_that_cannot_be_looked_into_are_refused():
    class Opaque(Replicated):
        def forward(self, x):
            return SimpleNamespace(y=self.linear(x))

    with pytest.raises(ValueError, match="outputs=SimpleNamespace must be tensors"):
        assert_parallel_equivalence(
            Opaque, X_TH, group=_world(), loss=lambda output: _squares(output.y)
        )
