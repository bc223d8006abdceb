"""DataParallel is its module in all but the gradients, and refuses what it cannot serve."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from megablocks_core.groups import LOCAL, Group, bind, gather_whole, marks
from megablocks_core.parallel import DataParallel, add_lora, clip_grad_norm_
from megablocks_core.testing import ranks


def _world():
    return Group.of(dist.group.WORLD)


def _model(dtype=torch.float32, width=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
    ).to(dtype)


def _x(group, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(group.size, 3, 4, generator=generator).to(dtype)


def _step(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@ranks(2)
def test_gradients_are_torchs_to_the_bit():
    group = _world()
    ours = DataParallel(_model(), group=group, bucket_bytes=100)
    theirs = DistributedDataParallel(_model())
    for _ in range(3):
        for mine, other in zip(
            _step(ours, _x(group)[group.rank]), _step(theirs, _x(group)[group.rank]), strict=True
        ):
            assert torch.equal(mine, other)


# 16 bits


def _bf16_errors(group, micro_batches):
    """Relative errors of the mean gradient over all micro-batches, by how they are summed."""
    model = DataParallel(nn.Linear(64, 64, bias=False).bfloat16(), group=group, reduction="sum")
    wide = DataParallel(
        nn.Linear(64, 64, bias=False).bfloat16(),
        group=group,
        reduction="sum",
        wide_gradients=True,
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(group.size, micro_batches, 64, generator=generator).bfloat16()
    dy = torch.randn(group.size, micro_batches, 64, generator=generator).bfloat16()
    for index in range(micro_batches):
        for one in (model, wide):
            with (
                one.no_sync()
                if index % 2 == 0 and index < micro_batches - 1
                else torch.enable_grad()
            ):
                one(x[group.rank, index : index + 1]).backward(dy[group.rank, index : index + 1])
    terms = (dy.float().unsqueeze(-1) * x.float().unsqueeze(-2)).bfloat16().double()
    exact = terms.sum((0, 1))
    assert model.weight.grad.dtype == torch.bfloat16
    assert wide.weight.grad.dtype == torch.float32
    return [
        float((one.weight.grad.double() - exact).norm() / exact.norm()) for one in (model, wide)
    ]


# Rounding to the nearest of 8 bits: at most 2^-9 of each value, about half of that by norm.
_ROUNDED_ONCE = 2**-9


@ranks(2, 4)
def test_errors_in_16_bits_do_not_grow():
    rounded, wide = _bf16_errors(_world(), 6)
    assert rounded < _ROUNDED_ONCE
    assert wide < 1e-6


@pytest.mark.slow
@ranks(2, 4, 8)
def test_errors_in_16_bits_do_not_grow_over_64_micro_batches():
    rounded, wide = _bf16_errors(_world(), 64)
    assert rounded < _ROUNDED_ONCE
    assert wide < 1e-6


@ranks(4)
def test_16_bits_on_the_wire_are_summed_in_float32():
    group = _world()
    model = DataParallel(
        nn.Linear(1, 1, bias=False).bfloat16(),
        group=group,
        reduction="sum",
        wire_dtype=torch.bfloat16,
        wide_gradients=True,
    )
    model(torch.full((1, 1), 256.0 if group.rank == 0 else 1.0).bfloat16()).sum().backward()
    assert model.weight.grad.tolist() == [[260.0]]  # 259, rounded once; in 16 bits 256


@ranks(2)
def test_a_lower_dtype_is_a_choice():
    group = _world()
    model = DataParallel(
        nn.Linear(1, 1, bias=False),
        group=group,
        reduction="sum",
        reduce_dtype=torch.bfloat16,
    )
    model(torch.full((1, 1), 256.0 if group.rank == 0 else 1.0)).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == 256.0


@ranks(1, 2)
def test_wide_gradients_are_float32_over_any_group():
    model = DataParallel(_model(torch.bfloat16), group=_world(), wide_gradients=True)
    gradients = _step(model, _x(_world(), torch.bfloat16)[0])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


# The plain module


def _metadata(module: Any) -> dict[str, Any]:
    return module.state_dict()._metadata


def _versions(module):
    return {path: _metadata(module).get(path) for path, _ in module.named_modules()}


def _is_plain(model, module):
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    assert [name for name, _ in model.named_buffers()] == [
        name for name, _ in module.named_buffers()
    ]
    assert [name for name, *_ in marks(model)] == [name for name, *_ in marks(module)]
    assert list(gather_whole(model)) == list(gather_whole(module))


@ranks(1, 2)
def test_names_and_states_are_the_modules_at_the_top_and_nested():
    inner = _model()
    model = DataParallel(inner, group=_world())
    _is_plain(model, _model())
    outer = nn.ModuleDict({"inner": model, "head": nn.Linear(4, 2)})
    plain = nn.ModuleDict({"inner": _model(), "head": nn.Linear(4, 2)})
    _is_plain(outer, plain)
    plain_versions = _versions(_model())
    assert _versions(model.module) == plain_versions
    assert {path: _metadata(model)[path] for path in plain_versions} == plain_versions
    assert _versions(plain).items() <= _metadata(outer).items()
    for parameter in plain.parameters():
        parameter.data.fill_(3.0)
    outer.load_state_dict(plain.state_dict())
    assert all((parameter == 3.0).all() for parameter in inner.parameters())
    model.load_state_dict(_model().state_dict())
    assert torch.equal(inner[2].weight, _model()[2].weight)
    missing, unexpected = model.load_state_dict({"9.weight": torch.ones(1)}, strict=False)
    assert "2.weight" in missing
    assert unexpected == ["9.weight"]


@ranks(1, 2)
def test_attributes_are_the_modules():
    inner = _model()
    inner.config = "kept"
    model = DataParallel(inner, group=_world())
    assert model.config == "kept"
    assert model.get_submodule("2") is inner[2]
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.eval()
    assert not inner.training


@ranks(2)
def test_alone_it_is_the_plain_module():
    model, plain = DataParallel(_model(), group=LOCAL), _model()
    x = _x(_world())[0]
    with CommDebugMode() as traffic, model.no_sync():
        for ours, theirs in zip(_step(model, x), _step(plain, x), strict=True):
            assert torch.equal(ours, theirs)
    assert traffic.get_total_counts() == 0
    assert model._reducer is None
    gradient = next(model.parameters()).grad
    assert gradient.untyped_storage().nbytes() == gradient.nbytes  # torch's own, in no buffer


@ranks(2)
def test_without_gradients_nothing_happens():
    model = DataParallel(_model().eval(), group=_world())
    with CommDebugMode() as traffic, torch.no_grad():
        model(_x(_world())[0])
    assert traffic.get_total_counts() == 0


@ranks(2)
def test_clipping_sees_reduced_gradients():
    group = _world()
    model = DataParallel(_model().eval(), group=group)
    gradients = _step(model, _x(group)[group.rank])
    norm = clip_grad_norm_(model, 1e-3)
    assert_close(norm, torch.stack(group.all_gather(norm))[0])
    assert_close(torch.nn.utils.get_total_norm(gradients), torch.tensor(1e-3), rtol=1e-2, atol=0)


@ranks(2)
def test_memory_is_one_flat_buffer():
    model = DataParallel(_model().eval(), group=_world())
    for _ in range(3):
        gradients = _step(model, _x(_world())[0])
        stores = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in gradients}
        assert len(stores) == 1
        (store,) = stores.values()
        assert store.nbytes() == sum(one.nbytes for one in model.parameters())


# Copies


@ranks(2)
def test_copies_are_wrapped_anew():
    group = _world()
    model = DataParallel(_model().eval(), group=group)
    expected = [gradient.clone() for gradient in _step(model, _x(group)[group.rank])]
    unpickled = pickle.loads(pickle.dumps(model))
    bind(unpickled, group)
    for one in (copy.deepcopy(model), unpickled, model):
        for _ in range(2):
            for mine, before in zip(_step(one, _x(group)[group.rank]), expected, strict=True):
                assert torch.equal(mine, before)


@ranks(2)
def test_the_module_is_plain_once_the_wrapper_is_gone():
    group = _world()
    module = _model().eval()
    model = DataParallel(module, group=group)
    _step(model, _x(group)[0])
    del model
    gc.collect()
    with CommDebugMode() as traffic:
        _step(module, _x(group)[0])
    assert traffic.get_total_counts() == 0
    DataParallel(module, group=group)


# Changes


@ranks(2)
def test_frozen_parameters_may_be_unfrozen_and_back():
    group = _world()
    module = _model().eval()
    module[0].requires_grad_(False)
    model, twin = DataParallel(module, group=group), copy.deepcopy(module)
    for frozen in (True, False, True):
        for one in (module, twin):
            one[0].requires_grad_(not frozen)
        gradients = _step(model, _x(group)[group.rank])
        twin.zero_grad()
        (twin(_x(group).flatten(0, 1)).square().sum() / group.size).backward()
        for ours, theirs in zip(gradients, twin.parameters(), strict=True):
            assert (ours is None) == (theirs.grad is None)
            if ours is not None:
                assert_close(ours, theirs.grad)


@ranks(2)
def test_parameters_added_later_are_found():
    group = _world()
    module = nn.Sequential(nn.Linear(4, 4))
    module.load_state_dict(nn.Sequential(_model()[0]).state_dict())
    model = DataParallel(module, group=group)
    add_lora(module, "0", rank=2, alpha=4)
    torch.manual_seed(0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    gradients = _step(model, _x(group)[group.rank])
    trained = [gradient for gradient in gradients if gradient is not None]
    assert len(trained) == 2
    for gradient in trained:
        assert torch.equal(*group.all_gather(gradient))


@ranks(2)
def test_parameters_that_change_on_one_rank_alone_are_named():
    group = _world()
    module = _model().eval()
    model = DataParallel(module, group=group)
    for parameter in (module[0].weight, module[2].weight):
        parameter.requires_grad_(group.rank == 0 and parameter is module[0].weight)
    with pytest.raises(ValueError, match=r"0\.weight.*requires_grad"):
        model(_x(group)[0])


@ranks(2)
def test_a_change_while_gradients_wait_is_refused():
    module = _model().eval()
    model = DataParallel(module, group=_world())
    with model.no_sync():
        _step(model, _x(_world())[0])
    module[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"must not change while gradients of no_sync\(\) wait"):
        model(_x(_world())[0])
    model.zero_grad()
    model(_x(_world())[0])


@ranks(2)
def test_no_sync_without_a_backward_does_nothing():
    group = _world()
    model = DataParallel(_model().eval(), group=group)
    expected = [gradient.clone() for gradient in _step(model, _x(group)[group.rank])]
    with model.no_sync():
        model(_x(group)[group.rank])
    for ours, before in zip(_step(model, _x(group)[group.rank]), expected, strict=True):
        assert torch.equal(ours, before)


@ranks(2)
def test_no_sync_holds_for_a_copy_and_for_what_is_planned_in_it():
    group = _world()
    x = _x(group)[group.rank]
    own = [gradient / group.size for gradient in _step(_model().eval(), x)]
    inner = _model().eval()
    model = DataParallel(inner, group=group)
    inner[0].requires_grad_(False)
    model(x)
    copied = copy.deepcopy(model)
    with copied.no_sync(), model.no_sync():
        copied.requires_grad_(True)
        model.requires_grad_(True)
        for one in (copied, model):
            for mine, alone in zip(_step(one, x), own, strict=True):
                assert_close(mine, alone)
        among = copy.deepcopy(model)
    reduced = _step(among, x)
    for mine, theirs in zip(reduced, _step(model, x), strict=True):
        assert torch.equal(mine, theirs) and not torch.equal(mine, own[0])


# Compiled


@ranks(2)
@pytest.mark.parametrize("outside", [False, True])
def test_a_compiled_module(outside):
    group = _world()
    plain = DataParallel(_model().eval(), group=group)
    if outside:
        model = torch.compile(DataParallel(_model().eval(), group=group), backend="aot_eager")
    else:
        inner = torch.compile(_model().eval(), backend="aot_eager", fullgraph=True)
        model = DataParallel(inner, group=group)
    for _ in range(2):
        ours = _step(model, _x(group)[group.rank])
        for mine, theirs in zip(ours, _step(plain, _x(group)[group.rank]), strict=True):
            assert_close(mine, theirs)


# Refusals


@ranks(2)
def test_f052_a_module_is_wrapped_once():
    group = _world()
    model = DataParallel(_model(), group=group)
    for wrapped, kind in (
        (model, "it is a DataParallel"),
        (nn.ModuleDict({"inner": model}), "inner is a DataParallel"),
        (DistributedDataParallel(_model()), "it is a DistributedDataParallel"),
    ):
        with pytest.raises(ValueError, match=f"must not be wrapped twice: {kind}"):
            DataParallel(wrapped, group=group)
    with pytest.raises(ValueError, match=r"'0\.weight' has its gradient reduced by another"):
        DataParallel(model.module, group=group)


@ranks(2)
def test_ranks_that_start_from_other_weights_are_named():
    torch.manual_seed(_world().rank)
    with pytest.raises(ValueError, match="'weight' must be the same on all ranks"):
        DataParallel(nn.Linear(2, 2), group=_world())


# Death

DYING = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megablocks_core.groups import Mesh
from megablocks_core.parallel import DataParallel

dist.init_process_group("gloo")
group = Mesh(dp=2, timeout=timedelta(seconds=20)).group("dp")
torch.manual_seed(0)
model = DataParallel(torch.nn.Linear(2, 2), group=group)
model(torch.ones(1, 2)).sum().backward()
y = model(torch.ones(1, 2))
if group.rank == 1:
    y.register_hook(lambda _: os._exit(7))
try:
    y.sum().backward()
except RuntimeError as error:
    assert "did not arrive over the ranks [0, 1]" in str(error), error
    os._exit(3)
"""


@pytest.mark.drill
def test_a_rank_that_dies_in_backward_ends_the_others_with_the_cause_named(launch, tmp_path):
    processes = launch("-c", DYING, ranks=2, cwd=tmp_path)
    assert sorted(process.wait(60) for process in processes) == [3, 7]
