"""Modules chosen by name run again in backward, with the outputs and gradients they had."""

import copy
import inspect
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from megablocks_core.groups import Group, bind
from megablocks_core.parallel import (
    HostBuffers,
    RecomputePolicy,
    offload,
    recompute_modules,
    tensor_parallelize,
)
from megablocks_core.testing import ranks
from tests.parallel.tiny_models import tiny_model

_TOKENS = torch.arange(16).view(2, 8) * 7 % 101


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x + self.mlp(self.norm(x)) * scale


class _Model(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=x.mean())
        return x


def _gradients(model, call=None):
    model.zero_grad()
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    y = (model if call is None else call)(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def _assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("layers.*", ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("1.mlp.0", ["layers.1.mlp.0"]),
        (
            ["layers.3", "layers.*.norm"],
            [f"layers.{i}.norm" for i in range(3)] + ["layers.3", "layers.3.norm"],
        ),
        (RecomputePolicy("layers.*", every=2), ["layers.0", "layers.2"]),
        (
            RecomputePolicy(["layers.*.mlp"], every=3, keep=["matmul"]),
            ["layers.0.mlp", "layers.3.mlp"],
        ),
        ("", [""]),
    ],
)
def test_names_choose_modules(policy, names):
    model = _Model()
    expected, state = _gradients(model), list(model.state_dict())
    assert sorted(recompute_modules(model, policy)) == sorted(names)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _assert_same_bits(_gradients(same), expected)
        assert list(same.state_dict()) == state


def test_only_the_chosen_modules_run_again():
    model = _Model()
    recompute_modules(model, RecomputePolicy("layers.*", every=2))
    _gradients(model)
    assert [layer.calls for layer in model.layers] == [2, 1, 2, 1]
    twin = copy.deepcopy(model)
    _gradients(twin)
    assert [layer.calls for layer in twin.layers] == [4, 2, 4, 2]
    assert [layer.calls for layer in model.layers] == [2, 1, 2, 1]


def test_hooks_of_a_chosen_module_run_once_and_those_within_it_again():
    model, outside, within = _Model(1), [], []
    recompute_modules(model, "layers.*")
    model.get_submodule("layers.0").register_forward_hook(lambda *_: outside.append(1))
    model.get_submodule("layers.0.norm").register_forward_hook(lambda *_: within.append(1))
    _gradients(model)
    assert (len(outside), len(within)) == (1, 2)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("layer.*", r"modules='layer.\*' must name modules of the _Model"),
        (["layers.0", "layers.4"], "modules='layers.4' must"),
        ("layers.*.mlp.*.weight", "must name modules"),
    ],
)
def test_a_name_without_a_module_raises(policy, message):
    with pytest.raises(ValueError, match=message):
        recompute_modules(_Model(), policy)


def test_policies_and_a_second_application_are_checked():
    for every in (0, 1.5):
        with pytest.raises(ValueError, match=f"every={every} must be a whole number of at least 1"):
            RecomputePolicy("layers.*", every=every)  # type: ignore
    with pytest.raises(ValueError, match=r"modules=\[\] must hold a name"):
        recompute_modules(_Model(), [])
    with pytest.raises(ValueError, match="keep='mm' must be one of"):
        RecomputePolicy("layers.*", keep=["mm"])
    model = _Model()
    recompute_modules(model, "layers.1")
    with pytest.raises(ValueError, match="layers.1 is recomputed already"):
        recompute_modules(model, "layers.*")
    assert "forward" not in vars(model.layers[0])


def test_who_asks_for_the_names_of_arguments_finds_them():
    """Such as ``evaluate``, which hands ``gather_logits`` to models that take it."""
    model = _Model()
    expected = inspect.signature(model.forward)
    recompute_modules(model, "")
    assert inspect.signature(model.forward) == expected
    assert inspect.signature(copy.deepcopy(model).forward) == expected


def test_tensors_in_the_place_of_parameters_stand_in_again():
    """``functional_call`` with other values, which are gone when backward comes."""
    model, plain = _Model(2), _Model(2)
    recompute_modules(model, "layers.*")
    results = []
    for one in (plain, model):
        others = {name: (p.detach() * 2).requires_grad_() for name, p in one.named_parameters()}
        y = functional_call(one, others, (torch.linspace(-1, 1, 12).view(3, 4),))
        y.square().sum().backward()
        results.append([y, *(tensor.grad for tensor in others.values())])
    _assert_same_bits(*results)
    assert all(name not in vars(part) for part in model.modules() for name in part._parameters)


def test_a_cache_of_keys_and_values_is_refused():
    model = tiny_model("llama")
    recompute_modules(model, "layers.*")
    with pytest.raises(ValueError, match="use_cache=True must be False where a LlamaDecoderLayer"):
        model(input_ids=_TOKENS)
    with torch.no_grad():
        model(input_ids=_TOKENS)
    model(input_ids=_TOKENS, use_cache=False).logits.sum().backward()


_POLICIES = (
    "layers.*",
    ["layers.*.self_attn", "layers.*.mlp"],
    ["layers.*", "layers.*.self_attn", "input_layernorm"],
    RecomputePolicy("layers.*", every=2, keep=["matmul", "attention", "messages"]),
)


@ranks(1, 2, 4, timeout=180)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tiny_llama_cut_over_ranks_has_the_bits_of_no_recomputation_and_no_offload(
    sequence_parallel,
):
    group = Group.of(dist.group.WORLD)
    policies = [*_POLICIES]
    if not sequence_parallel:
        policies.append(RecomputePolicy(["layers.*"], cut_over=group))
    plain, frozen = _llama(group, None, sequence_parallel), ("input_layernorm", "q_proj")
    expected = [_llama_gradients(plain, ()), _llama_gradients(plain, frozen)]
    buffers = HostBuffers()
    for policy in (None, *policies):
        model = _llama(group, policy, sequence_parallel)
        _assert_same_bits(_llama_gradients(model, frozen), expected[1])
        _assert_same_bits(_llama_gradients(model, (), buffers), expected[0])
    assert buffers.free == buffers.allocated > 0


def _llama(group, policy, sequence_parallel):
    torch.manual_seed(0)
    model = tiny_model("llama")
    tensor_parallelize(model, group=group, sequence_parallel=sequence_parallel)
    if policy is not None:
        recompute_modules(model, policy)
    return model


def _llama_gradients(model, frozen, buffers=None):
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(not any(part in name for part in frozen))
    moving = offload(buffers, min_bytes=1, from_host=True) if buffers else nullcontext()
    with moving:
        logits = model(input_ids=_TOKENS, use_cache=False).logits
    logits.square().sum().backward()
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@ranks(2)
def test_a_pickled_model_is_bound_to_its_ranks_again():
    group, model = Group.of(dist.group.WORLD), _Model(2)
    expected = _gradients(model)
    recompute_modules(model, RecomputePolicy("layers.*", cut_over=group))
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="call bind"):
        _gradients(loaded)
    bind(loaded, group)
    _assert_same_bits(_gradients(loaded), expected)


def test_it_compiles_whole():
    model = _Model(2)
    expected = _gradients(model)
    recompute_modules(model, RecomputePolicy(["layers.*", "layers.0.mlp"]))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for pair in zip(_gradients(model, compiled), expected, strict=True):
        torch.testing.assert_close(*pair)
