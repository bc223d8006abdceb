"""The clip norm is that of one process, and clipping scales as torch does."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

from megablocks_core.groups import (
    LOCAL,
    GradientShard,
    Group,
    Mesh,
    Segment,
    ShardSpec,
    chunk_slice,
    load_slices,
    logical_shape,
    mark,
    marks,
    set_gradient_shard,
)
from megablocks_core.parallel import ColumnParallelLinear, RowParallelLinear
from megablocks_core.parallel.gradients.clip import clip_grad_norm_
from megablocks_core.parallel.tensor.embedding import VocabParallelEmbedding
from megablocks_core.testing import ranks
from tests.parallel import gradient_layouts

_ORDERS = [1.0, 2.0, 3.0, math.inf]


def _world():
    return Group.of(dist.group.WORLD)


class _Model(nn.Module):
    """A replicated norm, uneven rows, packed segments and a row cut; the head is tied."""

    def __init__(self, group=LOCAL):
        super().__init__()
        packed = (Segment(8), Segment(4, parts=min(group.size, 2)))
        self.embedding = VocabParallelEmbedding(13, 8, group=group)
        self.norm = nn.LayerNorm(8)
        self.qkv = ColumnParallelLinear(8, 12, segments=packed, group=group)
        self.down = RowParallelLinear(12, 8, group=group)
        self.head = ColumnParallelLinear(8, 16, bias=False, group=group)
        self.head.weight = self.embedding.weight
        self.idle = nn.Linear(2, 2)


def _set_gradients(model):
    """Give each parameter its share of one whole random gradient."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter, specs in marks(model):
        shape = logical_shape(parameter, specs)
        whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if not name.startswith("idle"):
            parameter.grad = torch.empty_like(parameter)
            load_slices(parameter.grad, specs, whole)


@ranks(2)
@pytest.mark.parametrize("norm_type", _ORDERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_that_is_not_finite_on_one_rank_is_known_to_all(norm_type, value, rank):
    group = _world()
    for cut, pp in ((group, LOCAL), (LOCAL, group)):
        part = ColumnParallelLinear(2, 4, bias=False, group=cut)
        part.weight.grad = torch.ones_like(part.weight)
        if group.rank == rank:
            part.weight.grad[0, 0] = value
        norm = clip_grad_norm_(part, 1.0, norm_type=norm_type, pp=pp)
        assert_close(norm, norm.new_tensor(value), equal_nan=True)
        scaled = math.nan if math.isnan(value) else 0.0
        assert_close(part.weight.grad[1, 1], torch.tensor(scaled), equal_nan=True)


@ranks(1, 2, 4)
@pytest.mark.parametrize("norm_type", _ORDERS)
def test_norm_and_clipped_gradients_equal_one_process(norm_type):
    model, whole = _Model(_world()).double(), _Model().double()
    _set_gradients(model)
    _set_gradients(whole)
    for max_norm in (0.5, 1e9):
        norm = clip_grad_norm_(model, max_norm, norm_type=norm_type)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type=norm_type)
        assert_close(norm, expected, rtol=1e-12, atol=0)
        whole_gradients = dict(whole.named_parameters())
        for name, parameter, specs in marks(model):
            if name.startswith("idle"):
                assert parameter.grad is None
                continue
            share = torch.empty_like(parameter)
            load_slices(share, specs, whole_gradients[name].grad)
            assert_close(parameter.grad, share, rtol=1e-12, atol=0)


@ranks(2)
def test_f_018_a_replicated_parameter_counts_once():
    group = _world()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("cut", "whole")})
    mark(model, "cut", ShardSpec(0, group))
    model["cut"].grad = torch.tensor([[3.0], [4.0]][group.rank])
    model["whole"].grad = torch.tensor([12.0])
    assert clip_grad_norm_(model, 100.0).item() == 13.0


@ranks(2)
def test_f_046_experts_of_all_ranks_enter_the_norm():
    """Confirmed: a dense one on both ranks and an expert on each make the root of three."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("dense", "expert")})
    mark(model, "expert", ShardSpec(0, _world()), expert=True)
    for parameter in model.values():
        parameter.grad = torch.ones(1)
    assert_close(clip_grad_norm_(model, 1e9).item(), 3**0.5)


@ranks(2)
def test_f_047_dense_and_expert_gradients_have_one_norm():
    """Confirmed: 3 on both ranks, 4 and 12 as experts on one each, make 13 everywhere."""
    group = _world()
    model = nn.Module()
    model.dense, model.expert = (nn.Parameter(torch.zeros(1).double()) for _ in range(2))
    mark(model, "expert", ShardSpec(0, group), expert=True)
    model.dense.grad = torch.tensor([3.0]).double()
    model.expert.grad = torch.tensor([(4.0, 12.0)[group.rank]]).double()
    assert clip_grad_norm_(model, 6.5).item() == 13.0
    assert_close(model.dense.grad, torch.tensor([1.5]).double(), rtol=1e-6, atol=0)
    assert_close(model.expert.grad.item(), (2.0, 6.0)[group.rank], rtol=1e-6, atol=0)


@ranks(4)
def test_cuts_over_two_groups_and_stages_send_one_message_each():
    mesh = Mesh(tp=2, pp=2)
    tp, pp = mesh.group("tp"), mesh.group("pp")
    model = nn.ModuleList([ColumnParallelLinear(4, 4, group=tp), nn.LayerNorm(4)])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as traffic:
        norm = clip_grad_norm_(model, 1e9, pp=pp)
    assert traffic.get_total_counts() == 2
    assert_close(norm.item(), math.sqrt(2 * (16 + 4 + 8)))


@ranks(4)
@pytest.mark.parametrize("norm_type", _ORDERS)
def test_a_parameter_cut_twice_counts_whole(norm_type):
    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 3)) for name in "abc"})
    mark(model, "a", ShardSpec(0, tp), ShardSpec(0, dp))
    mark(model, "b", ShardSpec(0, dp))
    shared = ShardSpec(0, tp, (Segment(4, parts=1),))  # both ranks of tp hold all four rows
    mark(model, "c", shared, ShardSpec(0, dp))
    wholes = {"a": torch.randn(8, 3), "b": torch.randn(4, 3), "c": torch.randn(4, 3)}
    rows = {"a": 4 * tp.rank + 2 * dp.rank, "b": 2 * dp.rank, "c": 2 * dp.rank}
    for name, whole in wholes.items():
        model[name].grad = whole[rows[name] :][:2].clone()
    with CommDebugMode() as traffic:
        norm = clip_grad_norm_(model, 1e9, norm_type=norm_type)
    assert traffic.get_total_counts() == 2
    values = torch.cat([whole.flatten() for whole in wholes.values()]).double()
    assert_close(norm, torch.linalg.vector_norm(values, norm_type), rtol=1e-7, atol=0)


@ranks(2, 4)
def test_a_rank_without_gradients_takes_part():
    group = _world()
    layer = ColumnParallelLinear(4, 4, bias=False, group=group)
    assert clip_grad_norm_(layer, 1.0) == 0
    if group.rank == 0:
        layer.weight.grad = torch.ones_like(layer.weight)
    assert_close(clip_grad_norm_(layer, 1e9).item(), math.sqrt(16 / group.size))


@ranks(4)
def test_it_clips_what_torch_fsdp_cut_again():
    mesh = Mesh(tp=2, dp=2)
    tp = mesh.group("tp")
    layers = [ColumnParallelLinear(8, 12, segments=(Segment(8), Segment(4, parts=1)), group=tp)]
    whole = [ColumnParallelLinear(8, 12)]
    for layer in (*layers, *whole):
        layer.reset_parameters(seed=1)
    ranks_of_dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    model = fully_shard(layers[0], mesh=ranks_of_dp)
    x = torch.randn(3, 8)
    (y,) = (model(x),)
    rows = [slice(0, 4), slice(4, 8)][tp.rank]
    weights = torch.randn(3, 12)
    own = torch.cat([weights[:, rows], weights[:, 8:] * (tp.rank == 0)], dim=-1)
    (y * own).sum().backward()
    (whole[0](x) * weights).sum().backward()
    expected = nn.utils.clip_grad_norm_(whole[0].parameters(), 0.1)
    norm = clip_grad_norm_(model, 0.1)
    assert_close(norm.float(), expected)
    assert_close(clip_grad_norm_(model, 1e9).item(), 0.1, rtol=1e-4, atol=0)


@ranks(1, 4)
@pytest.mark.parametrize("millions", [6.4, pytest.param(64.0, marks=pytest.mark.slow, id="64.0")])
@pytest.mark.parametrize("constant", [False, True])
def test_float32_norms_are_exact_to_1e_6(millions, constant):
    group = _world()
    count = int(millions * 1e6)
    model = nn.ParameterDict({"cut": nn.Parameter(torch.empty(count // group.size))})
    mark(model, "cut", ShardSpec(0, group))
    if constant:
        exact = float(torch.tensor(0.01).double()) * math.sqrt(count)
        model["cut"].grad = torch.full((count // group.size,), 0.01)
    else:
        torch.manual_seed(group.rank)
        model["cut"].grad = torch.randn(count // group.size)
        squares = sum(part.double().square().sum() for part in model["cut"].grad.split(1 << 20))
        exact = math.sqrt(group.all_reduce(squares))
    norm = clip_grad_norm_(model, 1e9)
    assert abs(norm.item() / exact - 1) < 1e-6


def test_parameters_are_taken_as_whole_and_once():
    weight, bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    weight.grad, bias.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    norm = clip_grad_norm_((p for p in (weight, bias, weight)), 2.5)
    assert norm.dtype == torch.float64
    assert norm.item() == 5.0
    assert_close(weight.grad, torch.tensor([1.5, 0.0]), rtol=1e-6, atol=0)
    assert bias.grad.dtype == torch.bfloat16
    assert bias.grad.item() == 2.0
    assert_close(clip_grad_norm_(weight, 1e9).item(), 1.5, rtol=1e-6, atol=0)
    assert clip_grad_norm_([], 1.0).item() == 0.0


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("layout", gradient_layouts.LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_has_the_norm_of_one_process(layout, norm_type):
    wholes = gradient_layouts.whole_gradients()
    model = layout(wholes)
    before = {name: held.clone() for name, held in gradient_layouts.held_gradients(model).items()}
    flat = torch.cat([whole.flatten() for whole in wholes.values()])
    expected = torch.linalg.vector_norm(flat, norm_type)
    norm = clip_grad_norm_(model, 0.5, norm_type=norm_type)
    assert_close(norm, expected, rtol=1e-12, atol=0)
    for name, held in gradient_layouts.held_gradients(model).items():
        assert_close(held, before[name] * (0.5 / (expected + 1e-6)), rtol=1e-12, atol=0)


@ranks(2)
def test_f_060_plain_and_empty_shards_have_one_norm():
    group = _world()
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("cut", "whole")})
    empty = nn.Parameter(torch.zeros(1 - group.rank))  # one row over two ranks
    model["cut"] = empty
    mark(model, "cut", ShardSpec(0, group, (Segment(1),)))
    empty.grad = torch.full_like(empty, 3.0)
    model["whole"].grad = torch.tensor([4.0])
    assert clip_grad_norm_(model, 100.0).item() == 5.0


@ranks(4)
def test_f_059_ranks_that_own_padding_only_take_part():
    group = _world()
    for count in (9, 1):
        weight = nn.Parameter(torch.zeros(count))
        own = chunk_slice(count, 4, group.rank)
        values = torch.arange(1.0, count + 1)
        set_gradient_shard(weight, GradientShard(values[own].clone(), own.start, group))
        norm = clip_grad_norm_([weight], 1e9)
        assert_close(norm, values.double().norm(), rtol=1e-12, atol=0)


@ranks(4)
def test_a_thousand_parameters_send_one_message_for_each_group_that_cuts():
    mesh = Mesh(tp=2, dp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    model = nn.ParameterDict()
    for index in range(1000):
        model[f"p{index}"] = nn.Parameter(torch.zeros(2))
        mark(model, f"p{index}", *([ShardSpec(0, tp)] if index % 3 else []))
        shard = GradientShard(torch.ones(1), dp.rank, dp)
        if index % 2:
            set_gradient_shard(model[f"p{index}"], shard)
        else:
            model[f"p{index}"].grad = torch.ones(2)
    with CommDebugMode() as traffic:
        norm = clip_grad_norm_(model, 1e9)
    assert traffic.get_total_counts() == 2
    assert_close(norm.item(), math.sqrt(2 * 334 + 4 * 666))


def test_float32_gradients_of_bf16_parameters_are_clipped_in_float32():
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.tensor([3.0, 4.001])
    assert_close(clip_grad_norm_([weight], 1.0).item(), math.hypot(3.0, 4.001), rtol=1e-7, atol=0)
    assert weight.grad.dtype == torch.float32
    assert_close(weight.grad.norm().item(), 1.0, rtol=1e-6, atol=0)


def test_a_gradient_in_two_places_is_refused():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    set_gradient_shard(weight, GradientShard(torch.ones(2), 0, LOCAL))
    with pytest.raises(ValueError, match="must have its gradient in one place"):
        clip_grad_norm_([weight], 1.0)
