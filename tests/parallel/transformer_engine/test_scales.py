"""Scales of delayed scaling: plain buffers, shared with the engine, resumed bit for bit."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megablocks_core.ckpt import load, save
from megablocks_core.groups import LOCAL, Mesh
from megablocks_core.parallel.initial import reset_parameters
from megablocks_core.parallel.recipes import CurrentScaling, DelayedScaling
from megablocks_core.parallel.recipes.transformer_engine import to_transformer_engine
from megablocks_core.parallel.transformer_engine import grouped_linear, linear
from megablocks_core.parallel.transformer_engine.scales import Scales
from megablocks_core.testing import ranks
from tests.parallel.transformer_engine import fake
from tests.parallel.transformer_engine.fake import fixture as fixture
from tests.parallel.transformer_engine.fake_quantization import FP8GlobalStateManager, autocast

RECIPE = DelayedScaling(amax_history_len=3)
NAMES = {"fp8.scale_fwd", "fp8.amax_history_fwd", "fp8.scale_bwd", "fp8.amax_history_bwd"}


@contextmanager
def outer():
    with autocast(recipe=to_transformer_engine(RECIPE)):
        yield


def built(recipe=RECIPE, **options):
    torch.manual_seed(2)
    layer = linear(16, 16, parallel_mode="column", **options)
    layer.recipe = recipe
    return layer


def _forget(layer):
    layer.engine.module().fp8_meta.pop("in_buffers", None)


def steps(layer, count, start=0):
    """Outputs of so many steps; as in a process of its own, where no other layer is updated."""
    FP8GlobalStateManager.reset()
    _forget(layer)
    outputs = []
    for step in range(start, start + count):
        torch.manual_seed(step)
        x = torch.randn(16, 16) * (step + 1)
        with outer():
            y = layer(x)
        (y * (step + 1)).sum().backward()
        outputs.append(y.detach())
    return outputs


def test_a_recipe_with_history_has_buffers_and_others_have_none(te):
    layer = built()
    assert {name for name in layer.state_dict() if name.startswith("fp8")} == NAMES
    assert layer.scales.amax_history_fwd.shape == (3, 3)
    layer.recipe = CurrentScaling()
    assert set(layer.state_dict()) == {"weight", "bias"}
    layer.recipe = RECIPE
    layer.recipe = None
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_scales_follow_the_values(te):
    layer = built()
    steps(layer, 4)
    scale, history = layer.scales.scale_fwd, layer.scales.amax_history_fwd
    torch.manual_seed(3)
    amax = (torch.randn(16, 16) * 4).abs().max()
    torch.testing.assert_close(history[-1, 0], amax)
    torch.testing.assert_close(scale[0], 448 / history[:, 0].max())
    torch.testing.assert_close(scale[1], 448 / layer.weight.abs().max())
    assert layer.scales.scale_bwd[0] == 57344 / 4  # the gradient of the last step is 4 everywhere


def test_a_state_goes_on_bit_for_bit(te):
    whole = built()
    expected = steps(whole, 6)
    first = built()
    steps(first, 3)
    state = copy.deepcopy(first.state_dict())
    for again in (built(), copy.deepcopy(first)):
        again.load_state_dict(state)
        for pair in zip(steps(again, 3, 3), expected[3:], strict=True):
            assert torch.equal(*pair)
        torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_state_is_loaded_in_place_while_it_is_shared(te):
    layer, other = built(), built()
    steps(layer, 2)
    state = copy.deepcopy(layer.state_dict())
    steps(other, 3)
    other.load_state_dict(state)
    assert other.engine.module().fp8_meta["scaling_fwd"].scale is other.scales.scale_fwd
    assert torch.equal(steps(other, 1, 2)[0], steps(layer, 1, 2)[0])


def test_a_state_without_scales_starts_them_anew_and_scales_without_a_recipe_are_refused(te):
    plain, trained = built(None), built()
    steps(trained, 2)
    state = copy.deepcopy(trained.state_dict())
    trained.load_state_dict(plain.state_dict())
    assert torch.equal(trained.scales.scale_fwd, torch.ones(3))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "fp8.scale_fwd"'):
        plain.load_state_dict(state)


def test_checkpoints_hold_them(te, tmp_path):
    whole = built()
    expected = steps(whole, 4)
    first, second = built(), built()
    steps(first, 2)
    save(tmp_path / "a", {"layer": first})
    load(tmp_path / "a", {"layer": second})
    assert torch.equal(steps(second, 1, 2)[0], expected[2])
    with pytest.raises(Exception, match="fp8"):
        load(tmp_path / "a", {"layer": built(None)})
    save(tmp_path / "b", {"layer": built(None)})
    with pytest.raises(Exception, match="fp8"):
        load(tmp_path / "b", {"layer": built()})
    load(tmp_path / "b", {"layer": built()}, strict=False)


def test_casts_leave_them_in_float32_and_meta_starts_them(te):
    layer = built()
    with torch.no_grad():
        layer.scales.scale_fwd.fill_(1 + 2.0**-20)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.scales.scale_fwd.tolist() == [1 + 2.0**-20] * 3
    empty = linear(16, 16, parallel_mode="row", device="meta")
    empty.recipe = RECIPE
    empty.to_empty(device="cpu")
    reset_parameters(empty, seed=1)
    assert torch.equal(empty.scales.scale_fwd, torch.ones(3))


@ranks(2, 4)
def test_amaxes_are_reduced_over_the_group_alone():
    size = dist.get_world_size()
    mesh = Mesh(tp=2)
    with fake.installed():
        tp = mesh.group("tp")
        for sequence_parallel in (False, True):
            layer = built(group=tp, sequence_parallel=sequence_parallel)
            assert layer.amax_group is tp
            torch.manual_seed(0)
            torch.nn.init.normal_(layer.weight, std=1 + dist.get_rank())
            with outer():
                layer(torch.randn(16, 16)).sum().backward()
            largest = layer.weight.detach().abs().max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp.pg)
            torch.testing.assert_close(layer.scales.scale_fwd[1], 448 / largest)
        FP8GlobalStateManager.reset()
        # To Transformer Engine no group means the world; ours means this rank.
        alone = built()
        torch.nn.init.constant_(alone.weight, 1 + dist.get_rank())
        if dist.get_rank() < size - 1:
            with outer():
                alone(torch.randn(16, 16)).sum().backward()
            expected = torch.tensor(448 / (1 + dist.get_rank()))
            torch.testing.assert_close(alone.scales.scale_fwd[1], expected)
        layer = built(group=tp, sequence_parallel=True)
        layer.amax_group = LOCAL
        with pytest.raises(ValueError, match="amax_group=.* must hold the ranks"), outer():
            layer(torch.randn(16, 16))


@ranks(2)
def test_scales_of_experts_are_cut_as_the_experts_are(tmp_path):
    ep = Mesh(ep=2).expert.group("ep")
    with fake.installed():
        layer = grouped_linear(4, 16, 16, ep=ep, bias=False)
        layer.recipe = RECIPE
        with outer():
            layer(torch.randn(8, 16) * (1 + ep.rank), [3, 5]).sum().backward()
        assert len(set(layer.scales.scale_fwd.tolist())) > 2
        save(tmp_path / "a", {"layer": layer}, group=ep)
        whole = grouped_linear(4, 16, 16, bias=False)
        whole.recipe = RECIPE
        load(tmp_path / "a", {"layer": whole}, group=ep)
        part = slice(6 * ep.rank, 6 * ep.rank + 6)
        assert torch.equal(whole.scales.scale_fwd[part], layer.scales.scale_fwd)
        assert torch.equal(whole.scales.amax_history_fwd[:, part], layer.scales.amax_history_fwd)


def test_shapes():
    scales = Scales(5, 2, group=LOCAL)
    shapes = {name: tuple(each.shape) for name, each in scales.named_buffers()}
    assert shapes == {
        "scale_fwd": (6,),
        "amax_history_fwd": (5, 6),
        "scale_bwd": (4,),
        "amax_history_bwd": (5, 4),
    }
