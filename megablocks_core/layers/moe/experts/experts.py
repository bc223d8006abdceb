"""The experts of a mixture, stacked (SwiGLU ones: https://arxiv.org/abs/2401.04088, section 2.1).

Dimensions: E experts, I features, H hidden size, M rows, N places. A lowercase letter is this
rank's share of the capital one: e = E / ep.size, i = I / etp.size.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megablocks_core.groups import (
    LOCAL,
    Group,
    Segment,
    ShardSpec,
    mark,
    specs_of,
    split_evenly,
)
from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.experts.activations import ACTIVATIONS
from megablocks_core.layers.moe.experts.adapted import Adapters, Factors, adapted
from megablocks_core.layers.moe.experts.amaxes import input_amaxes
from megablocks_core.layers.moe.experts.block_sparse import block_sparse
from megablocks_core.layers.moe.experts.forms import capacity, grouped, require_capacity
from megablocks_core.layers.moe.experts.loop import loop
from megablocks_core.layers.moe.experts.memory import FRESH, KeptMemory
from megablocks_core.layers.moe.experts.projections import Formula, Projections, Weigh
from megablocks_core.parallel.initial import key_for, uniform_
from megablocks_core.parallel.tensor.adapters import Adapter, factor_copies

Form = Literal["grouped", "capacity", "block_sparse", "loop"]
_TWINS = {"block_sparse": block_sparse, "loop": loop}
_FORMS = ("grouped", "capacity", *_TWINS)
_WEIGH = ("hidden", "input", "output")


class GroupedExperts(nn.Module):
    """``down_proj(activation(gate_proj(x), up_proj(x)))`` of each place's expert, weighted.

    Maps ``Dispatched`` with ``x`` [M H] to ``y`` [N H], zero in empty places. Over ``etp`` each
    rank has the part of ``y`` that its features give; a dispatcher sums these. Nothing is sent, but
    for adapters (``add_lora``): backward all-reduces the gradients of their whole factors over
    ``etp``, in one message.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_size: I.
        activation: A name of ``ACTIVATIONS``; plain ones have no ``gate_proj``.
        bias: Add biases to all projections.
        weigh: What a place's weight multiplies: the "hidden" activation, the "input" (as Llama
            4 does), or the "output". The first and the last differ in rounding alone.
        form: How it is computed; all forms give the same. "grouped" is for any use; "capacity"
            takes what a dispatcher with a capacity gives; "loop" and "block_sparse" are plain
            twins.
        persistent_gradients: Backward of "grouped" and "capacity" adds to the ``.grad`` of a
            parameter itself where there is one and it is a leaf without hooks;
            ``torch.autograd.grad`` does not see this, nor do wrappers that wait for gradients.
            On a CPU, memory of what is gone is kept for the next step: that of gradients, of
            results and of what backward reads. With adapters it is without effect.
        ep: The ranks that share the experts.
        etp: The ranks that share the features of each expert.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``num_experts`` or ``ffn_size`` does not divide evenly over its group, or an
            option is none of those named.
    """

    gate_proj: nn.Parameter | None
    up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        weigh: Weigh = "hidden",
        form: Form = "grouped",
        persistent_gradients: bool = False,
        ep: Group = LOCAL,
        etp: Group = LOCAL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require("activation", activation, ACTIVATIONS)
        _require("weigh", weigh, _WEIGH)
        _require("form", form, _FORMS)
        self.num_experts, self.hidden_size, self.ffn_size = num_experts, hidden_size, ffn_size
        self.experts = split_evenly(num_experts, group=ep, name="num_experts")
        self.features = split_evenly(ffn_size, group=etp, name="ffn_size")
        self.activation, self.form = activation, form
        self.weigh: Weigh = weigh
        self._memory = KeptMemory() if persistent_gradients else FRESH
        self.ep, self.etp = ep, etp
        self.stack_adapters: dict[str, Adapter] = {}
        self._add_parameters(bias, device, dtype)
        self.reset_parameters()

    @property
    def formula(self) -> Formula:
        """What is computed; no attribute, because a pickle cannot hold torch's operations."""
        return Formula(ACTIVATIONS[self.activation], self.weigh)

    def _add_parameters(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        experts, features = (part.stop - part.start for part in (self.experts, self.features))
        rows, columns = ShardSpec(1, self.etp), ShardSpec(2, self.etp)
        first = ("gate", "up") if self.formula.activation.gated else ("up",)
        shapes: dict[str, tuple[tuple[int, ...], tuple[ShardSpec, ...]]] = {}
        for name in first:
            shapes[f"{name}_proj"] = (features, self.hidden_size), (rows,)
        shapes["down_proj"] = (self.hidden_size, features), (columns,)
        if bias:
            shapes |= {f"{name}_bias": ((features,), (rows,)) for name in first}
            # All ranks of etp hold the whole of it, and its whole gradient.
            held = Segment(self.hidden_size, parts=1)
            shapes["down_bias"] = (self.hidden_size,), (ShardSpec(1, self.etp, (held,)),)
        for name in ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias"):
            if name not in shapes:
                self.register_parameter(name, None)
                continue
            shape, specs = shapes[name]
            value = torch.empty(experts, *shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value))
            layer, _, kind = name.partition("_")
            leaf = "weight" if kind == "proj" else "bias"
            each = f"experts.{{}}.{layer}_proj.{leaf}"
            mark(self, name, ShardSpec(0, self.ep), *specs, each=each, expert=True)

    def reset_parameters(self, seed: int | None = None, prefix: str = "") -> None:
        """Draw each expert's values as ``nn.Linear`` does; one seed is one model at any size."""
        for name, parameter in self.named_parameters(recurse=False):
            inputs = self.ffn_size if name.startswith("down") else self.hidden_size
            bound = inputs**-0.5 if inputs else 0.0
            key = key_for(parameter, prefix + name, seed)
            uniform_(parameter, key=key, low=-bound, high=bound, specs=specs_of(self, name))

    def forward(self, dispatched: Dispatched) -> Tensor:
        """Weighted results of the experts here, a row for each place [N H]."""
        projections, adapters = self._projections(), self._adapters()
        device = dispatched.x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            dispatched = dispatched._replace(x=dispatched.x.to(dtype))
            projections = projections.each(lambda tensor: tensor.to(dtype))
            adapters = adapters and adapters.each(lambda tensor: tensor.to(dtype))
        x, dtype = dispatched.x, projections.up.dtype
        if x.shape[-1] != self.hidden_size or x.dtype != dtype:
            # Also where no token came: other ranks raise, and nobody waits for this one.
            rule = f"{dtype} [M {self.hidden_size}], as the parameters"
            raise ValueError(f"x of {x.dtype} and shape {list(x.shape)} must be {rule}")
        if self.form in _TWINS:
            projections = adapters.added_to(projections) if adapters else projections
            return _TWINS[self.form](dispatched, projections, self.formula)
        if adapters:
            if self.form == "capacity":
                require_capacity(dispatched)
            return adapted(dispatched, projections, adapters, self.formula)
        memory = FRESH if torch.compiler.is_compiling() else self._memory
        compute = capacity if self.form == "capacity" else grouped
        return compute(dispatched, projections, self.formula, memory=memory)

    @torch.no_grad()
    def input_amaxes(self, dispatched: Dispatched) -> dict[str, Tensor]:
        """The largest magnitude of what each expert here multiplies a projection with.

        What ``forward`` of the same ``dispatched`` computes is looked at, before a place's weight
        is applied to the hidden activation. Sends nothing.

        Returns:
            By name of the projection one float32 for each expert here [e]; -inf for one without
            tokens.
        """
        projections, adapters = self._projections(), self._adapters()
        projections = adapters.added_to(projections) if adapters else projections
        found = input_amaxes(dispatched, projections, self.formula)
        return {f"{name}_proj": amax_e for name, amax_e in found.items()}

    def _projections(self) -> Projections:
        down_bias: Tensor | None = self.down_bias
        if down_bias is not None and self.etp.size > 1:
            down_bias = _OnFirstRank.apply(down_bias, self.etp.rank == 0)
        return Projections(
            self.gate_proj,
            self.up_proj,
            self.down_proj,
            self.gate_bias,
            self.up_bias,
            down_bias,
        )

    def _adapters(self) -> Adapters | None:
        """Those that are not merged."""
        active = {name: x for name, x in self.stack_adapters.items() if not x.merged}
        if not active:
            return None
        copies = factor_copies(list(active.values()))
        return Adapters(
            **{
                name.removesuffix("_proj"): Factors(*pair, adapter.scale)
                for (name, adapter), pair in zip(active.items(), copies, strict=True)
            }
        )

    def extra_repr(self) -> str:
        """The whole sizes, what is computed and the number of ranks."""
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"ffn_size={self.ffn_size}, activation={self.activation!r}, "
            f"bias={self.down_bias is not None}, weigh={self.weigh!r}, form={self.form!r}, "
            f"ep={self.ep.size}, etp={self.etp.size}"
        )


class _OnFirstRank(torch.autograd.Function):
    """A bias that one rank adds to a sum over ranks, all of which have its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
        return bias.clone() if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def _require(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
