"""``transformer_engine`` 2.20.2 in plain torch, for any device and dtype.

Constructors and ``forward`` take what the published ones take, and no more; names and shapes of
parameters, collectives (along the first dimension) and the keeping of scales are theirs too. So
calls that run here run there, as far as a processor can say it. What ours never asks for raises.
``installed`` puts it in place of the real package, in workers too.
"""

# ruff: noqa: PLR0913 (the published arguments)

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megablocks_core.groups import (
    LOCAL,
    Group,
    all_gather_to,
    copy_to,
    reduce_from,
    reduce_scatter_to,
)
from tests.parallel.transformer_engine import fake_quantization, fake_recipe
from tests.parallel.transformer_engine.fake_attention import DotProductAttention
from tests.parallel.transformer_engine.fake_quantization import (
    FP8GlobalStateManager,
    Scaling,
    quantised_at_birth,
)


class _Base(nn.Module):
    """What the modules with products share."""

    def __init__(self, name=None):
        super().__init__()
        self.name, self.fp8, self.fp8_initialized = name, False, False
        self.fp8_meta = {}
        self.tp_group, self.tp_size = None, 1

    def _cut(self, tp_group, tp_size, sequence_parallel, parallel_mode):
        assert parallel_mode in (None, "column", "row")
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    @property
    def _group(self):
        return LOCAL if self.tp_size == 1 else Group.of(self.tp_group)

    def init_fp8_metadata(self, num_gemms=1):
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if not self.fp8:
            self.fp8_initialized = False
            return
        if self.fp8_initialized and self.fp8_meta["recipe"] == recipe:
            return
        self.fp8_meta["recipe"] = recipe
        self.fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        self.fp8_meta["num_gemms"] = num_gemms
        if recipe.delayed() and "scaling_fwd" not in self.fp8_meta:
            length, device = recipe.amax_history_len, next(self.parameters()).device
            self.fp8_meta["scaling_fwd"] = Scaling(length, 3 * num_gemms, device)
            self.fp8_meta["scaling_bwd"] = Scaling(length, 2 * num_gemms, device)
        self.fp8_initialized = True

    def _prepare(self, inp, num_gemms=1):
        for name, parameter in self.named_parameters():
            if parameter.dtype != inp.dtype and not torch.is_autocast_enabled():
                raise TypeError(f"input of {inp.dtype} and {name} of {parameter.dtype}")
        self.init_fp8_metadata(num_gemms)
        if self.fp8 and self.fp8_meta["recipe"].delayed():
            assert self.fp8_meta["recipe"].reduce_amax or not self.sequence_parallel
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def _product(self, x, weight, gemm=0):
        if not self.fp8:
            return F.linear(x, weight)
        first = FP8GlobalStateManager.is_first_fp8_module()
        return _Rounded.apply(x, weight, self.fp8_meta, gemm, first)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        raise AssertionError("pickled state is never read")


class _Rounded(torch.autograd.Function):
    """A product of rounded operands; in backward its gradient is rounded."""

    @staticmethod
    def forward(ctx, x, weight, meta, gemm, first):
        x = _round(x, meta, "scaling_fwd", 3 * gemm)
        weight = _round(weight, meta, "scaling_fwd", 3 * gemm + 1)
        ctx.save_for_backward(x, weight)
        ctx.meta, ctx.gemm, ctx.first = meta, gemm, first
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, *dys):
        x, weight = ctx.saved_tensors
        dy = _round(dys[0], ctx.meta, "scaling_bwd", 2 * ctx.gemm)
        dx = dy @ weight
        dweight = dy.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, dweight, None, None, None


def _round(x, meta, key, index):
    recipe, forward = meta["recipe"], key == "scaling_fwd"
    value = recipe.fp8_format.value
    largest = value.max_fwd if forward else value.max_bwd
    dtype = torch.float8_e4m3fn if largest == 448 else torch.float8_e5m2
    amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    if recipe.delayed():
        scaling = meta[key]
        scaling.amax_history[0, index] = torch.maximum(scaling.amax_history[0, index], amax)
        scale = scaling.scale[index].clone()
    else:
        scale = torch.where(amax > 0, largest / amax, 1.0)
    rounded = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return (rounded.float() / scale).to(x.dtype)


class Linear(_Base):
    """``inp weight^T + bias``, over ranks as ``parallel_mode`` says."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__(name)
        assert not (fuse_wgrad_accumulation or parameters_split or delay_wgrad_compute)
        self._cut(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.use_bias, self.return_bias = bias, return_bias
        if parallel_mode == "column":
            assert out_features % self.tp_size == 0
            out_features //= self.tp_size
        if parallel_mode == "row":
            assert in_features % self.tp_size == 0
            in_features //= self.tp_size
        place = {"device": device, "dtype": params_dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **place))
        if init_method is not None:
            init_method(self.weight)
        self.weight = quantised_at_birth(self.weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **place))
        else:
            self.bias = torch.empty(0, **place)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self._prepare(inp)
        return self._linear(inp)

    def _linear(self, inp):
        y = over_ranks(self, inp, lambda x: self._product(x, self.weight))
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


def over_ranks(module, x, product):
    """A product between the collectives of its layer."""
    group, sequence_parallel = module._group, module.sequence_parallel
    if group.size == 1 or module.parallel_mode is None:
        return product(x)
    if module.parallel_mode == "column":
        if sequence_parallel:
            return product(all_gather_to(x, dim=0, group=group))
        return product(copy_to(x, group=group))
    if sequence_parallel:
        return reduce_scatter_to(product(x), dim=0, group=group)
    return reduce_from(product(x), group=group)


class LayerNormLinear(_Base):
    """A norm and a linear layer."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__(name)
        assert normalization in ("LayerNorm", "RMSNorm")
        assert parallel_mode != "row"
        self._cut(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma, self.use_bias = zero_centered_gamma, bias
        if parallel_mode == "column":
            out_features //= self.tp_size
        place = {"device": device, "dtype": params_dtype}
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, **place))
        centred = normalization == "LayerNorm"
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features, **place)) if centred else None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **place))
        if init_method is not None:
            init_method(self.weight)
        self.weight = quantised_at_birth(self.weight)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **place))
        else:
            self.bias = torch.empty(0, **place)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self._prepare(inp)
        weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        if self.normalization == "RMSNorm":
            x = F.rms_norm(inp, weight.shape, weight, self.eps)
        else:
            x = F.layer_norm(inp, weight.shape, weight, self.layer_norm_bias, self.eps)
        y = over_ranks(self, x, lambda x: self._product(x, self.weight))
        return y + self.bias if self.use_bias else y


class GroupedLinear(_Base):
    """As many linear layers as experts, on rows that lie one expert after the other."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
        name=None,
        use_grouped_tensor=None,
    ):
        super().__init__(name)
        assert not (single_grouped_weight or single_grouped_bias or use_grouped_tensor)
        self._cut(tp_group, tp_size, sequence_parallel, parallel_mode)
        assert not (self.tp_size > 1 and bias)
        self.num_gemms, self.use_bias = num_gemms, bias
        if parallel_mode == "column":
            out_features //= self.tp_size
        if parallel_mode == "row":
            in_features //= self.tp_size
        self.out_features = out_features
        place = {"device": device, "dtype": params_dtype}
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, **place))
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(
                    f"bias{i}", nn.Parameter(torch.empty(out_features, **place))
                )
            else:
                setattr(self, f"bias{i}", torch.empty(0, **place))

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        assert out is None and dgrad_out is None
        splits = torch.as_tensor(m_splits).tolist()
        assert len(splits) == self.num_gemms and sum(splits) == len(inp)
        self._prepare(inp, self.num_gemms)
        if self.fp8:  # The real kernels serve no other shapes.
            assert all(split % 16 == 0 for split in splits)
        pieces = []
        for i, x in enumerate(inp.split(splits)):
            y = self._product(x, getattr(self, f"weight{i}"), i)
            pieces.append(y + getattr(self, f"bias{i}") if self.use_bias else y)
        return torch.cat(pieces)


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        assert params_dtype is None and hidden_size is None
        assert set(kwargs) <= {"device", "dtype", "sm_margin"}
        place = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, **place))  # pyright: ignore

    def forward(self, input, *extra_inputs, **kwargs):
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.rms_norm(input, weight.shape, weight, self.eps)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)


class LayerNorm(nn.Module):
    """``(x - mean(x)) / std(x) * weight + bias``."""

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        assert params_dtype is None and hidden_size is None
        assert set(kwargs) <= {"device", "dtype", "sm_margin"}
        place = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, **place))  # pyright: ignore
        self.bias = nn.Parameter(torch.empty(normalized_shape, **place))  # pyright: ignore

    def forward(self, input, *extra_inputs, **kwargs):
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(input, weight.shape, weight, self.bias, self.eps)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)


MODULES = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)


def _package():
    names = ["", ".common", ".common.recipe", ".pytorch", ".pytorch.quantization"]
    made = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    pytorch, quantization, recipe = (
        made[f"transformer_engine.{name}"]
        for name in ("pytorch", "pytorch.quantization", "common.recipe")
    )
    for kind in MODULES:
        setattr(pytorch, kind.__name__, kind)
    for name in fake_quantization.NAMES:
        setattr(quantization, name, getattr(fake_quantization, name))
    pytorch.autocast = fake_quantization.autocast  # pyright: ignore[reportAttributeAccessIssue]
    pytorch.quantized_model_init = (  # pyright: ignore[reportAttributeAccessIssue]
        fake_quantization.quantized_model_init
    )
    for name in fake_recipe.NAMES:
        setattr(recipe, name, getattr(fake_recipe, name))
    made["transformer_engine"].__version__ = "2.20.2"  # pyright: ignore
    return made


@contextmanager
def installed():
    """The fake in place of the real package, with fresh state; for bodies of ``@ranks`` too."""
    made = _package()
    theirs = {name: each for name, each in sys.modules.items() if _is_theirs(name)}
    for name in theirs:
        del sys.modules[name]
    sys.modules.update(made)
    FP8GlobalStateManager.reset()
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(theirs)


def _is_theirs(name):
    return name == "transformer_engine" or name.startswith("transformer_engine.")


@pytest.fixture(name="te")
def fixture():
    """``installed`` for a test of one process."""
    with installed():
        yield
