"""``transformer_engine.pytorch.quantization`` in plain torch: contexts, amaxes and scales.

As the real one, it reduces amaxes and makes new scales where the outermost ``autocast`` ends
(forward), and after backward of the first module that ran in it (backward).
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.transformer_engine import fake_recipe


@dataclass
class State:
    """What the real package keeps for a process."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Any = None
    fp8_distributed_group: Any = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    autocast_depth: int = 0
    is_first_fp8_module: bool = False
    autocast_arguments: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)


class FP8GlobalStateManager:
    """What holds in the contexts that are open."""

    quantization_state = State()

    @classmethod
    def reset(cls):
        cls.quantization_state = State()

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def with_fp8_parameters(cls):
        return cls.quantization_state.fp8_parameters

    @classmethod
    def get_fp8_recipe(cls):
        return cls.quantization_state.fp8_recipe or fake_recipe.DelayedScaling()

    @classmethod
    def get_fp8_group(cls):
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls):
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta):
        if fp8_meta.get("in_buffers"):
            return
        fp8_meta["in_buffers"] = True
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            owner = (forward, _key(fp8_meta["recipe"], fp8_meta["fp8_group"]))
            cls.quantization_state.buffers.setdefault(owner, []).append(fp8_meta[key])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        state = cls.quantization_state
        for (is_forward, key), scalings in state.buffers.items():
            if is_forward != forward:
                continue
            recipe, group = state.autocast_arguments[key]
            amaxes = torch.cat([scaling.amax_history[0] for scaling in scalings])
            reduces = recipe.reduce_amax and dist.is_initialized()
            if reduces and dist.get_world_size(group=group) > 1:
                dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
            pieces = amaxes.split([len(scaling.scale) for scaling in scalings])
            value = recipe.fp8_format.value
            largest = value.max_fwd if forward else value.max_bwd
            for scaling, amax in zip(scalings, pieces, strict=True):
                scaling.amax_history[0].copy_(amax)
                scaling.update(recipe, largest)


class Scaling:
    """Scales and histories of the tensors of one direction."""

    def __init__(self, length, count, device):
        self.scale = torch.ones(count, device=device)
        self.amax_history = torch.zeros(length, count, device=device)

    def update(self, recipe, largest):
        by_max = recipe.amax_compute_algo == "max"
        amax = self.amax_history.amax(0) if by_max else self.amax_history[0].clone()
        self.amax_history.copy_(torch.roll(self.amax_history, -1, 0))
        self.amax_history[0] = 0
        new = (largest / amax) / 2**recipe.margin
        self.scale.copy_(torch.where((amax > 0) & torch.isfinite(amax), new, self.scale))


class QuantizedTensor(torch.Tensor):
    """Values of E4M3 under one scale; what is copied into it is rounded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    _quantizer = "of the tensor"

    def detach(self):
        return super().detach().as_subclass(QuantizedTensor)

    def copy_(self, src, non_blocking=False):
        values = src.detach().float()
        scale = 448 / values.abs().max()
        values = (values * scale).to(torch.float8_e4m3fn).float() / scale
        return super().copy_(values)


def quantised_at_birth(parameter):
    """The parameter in low precision, if modules are born in it."""
    if not FP8GlobalStateManager.with_fp8_parameters() or parameter.is_meta:
        return parameter
    made = torch.empty_like(parameter).detach().as_subclass(QuantizedTensor)
    with torch.no_grad():
        made.copy_(parameter)
    return torch.nn.Parameter(made)


def _key(recipe, group):
    return f"recipe={recipe},group={None if group is None else id(group)}"


class autocast:
    """Quantised products inside."""

    def __init__(
        self,
        enabled=True,
        calibrating=False,
        recipe=None,
        amax_reduction_group=None,
        _graph=False,
    ):
        self._enabled, self._calibrating, self._graph = enabled, calibrating, _graph
        self._recipe, self._group = recipe, amax_reduction_group
        self._before = None

    def __enter__(self):
        if self._before is not None:
            raise RuntimeError("autocast cannot be entered more than once concurrently")
        state = FP8GlobalStateManager.quantization_state
        self._before = (
            state.fp8_enabled,
            state.fp8_calibration,
            state.fp8_recipe,
            state.fp8_distributed_group,
            state.is_first_fp8_module,
        )
        recipe = self._recipe or fake_recipe.DelayedScaling()
        state.autocast_arguments[_key(recipe, self._group)] = (recipe, self._group)
        state.fp8_enabled, state.fp8_calibration = self._enabled, self._calibrating
        state.fp8_recipe, state.fp8_distributed_group = recipe, self._group
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        state = FP8GlobalStateManager.quantization_state
        (
            state.fp8_enabled,
            state.fp8_calibration,
            state.fp8_recipe,
            state.fp8_distributed_group,
            state.is_first_fp8_module,
        ) = self._before  # pyright: ignore[reportGeneralTypeIssues]
        self._before = None
        state.autocast_depth -= 1
        if self._enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Modules made inside hold quantised parameters."""
    state = FP8GlobalStateManager.quantization_state
    before = state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val
    state.fp8_parameters = enabled
    state.fp8_recipe = recipe or fake_recipe.DelayedScaling()
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val = before


NAMES = ("FP8GlobalStateManager", "autocast", "quantized_model_init")
