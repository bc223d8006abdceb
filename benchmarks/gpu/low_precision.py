"""Layers of Transformer Engine against ours in bfloat16 and in every recipe, and their times.

In low precision what is right is ``emulated_linear``, which is itself held to the exact product.

Dimensions: T tokens, I input features, O output features, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.gpu.checks import (
    Check,
    Figures,
    error_of,
    milliseconds,
    product_rate,
    require,
)
from megablocks_core.layers.norm import LayerNorm, RMSNorm
from megablocks_core.parallel import transformer_engine as te
from megablocks_core.parallel.optional import imported, is_installed
from megablocks_core.parallel.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)
from megablocks_core.parallel.recipes.emulation import emulated_linear
from megablocks_core.parallel.recipes.state import state_for
from megablocks_core.parallel.recipes.transformer_engine import (
    outer_autocast,
    to_transformer_engine,
)

RECIPES: dict[str, Recipe] = {
    "delayed scaling": DelayedScaling(amax_history_len=4),
    "current scaling": CurrentScaling(),
    "block scaling": BlockScaling(),
    "MXFP8": MXFP8(),
    # Without chance, so that two computations can agree.
    "NVFP4": NVFP4(stochastic_rounding=False),
}
# By norm: what rounding operands to 8 and to 4 bits costs, and what the order of sums does.
EXACT, EXACT_4_BITS, ORDER = 0.06, 0.25, 1e-2
BFLOAT16 = 1e-2

SIZES = (256, 512, 384)  # T, I, O
LARGE = (8192, 4096, 14336)  # is timed


def emulation(device: torch.device) -> Figures:
    """The emulated products against exact ones: output and both gradients, at the third step."""
    figures = {}
    for name, recipe in RECIPES.items():
        x, weight, dy = _leaves(SIZES, torch.float32, device)
        state = state_for(recipe, device=device)
        multiply = partial(emulated_linear, recipe=recipe, state=state)
        rounded = [_products(multiply, x, weight, dy) for _ in range(3)][-1]
        exact = _products(linear, x, weight, dy)
        limit = EXACT_4_BITS if isinstance(recipe, NVFP4) else EXACT
        figures[name] = _worst(rounded, exact, limit, name)
    return figures


def layers(device: torch.device) -> Figures:
    """Transformer Engine's layers in bfloat16 against ours in float64."""
    require("transformer_engine")
    _, width, features = SIZES
    place: dict[str, Any] = {"device": device, "dtype": _dtype(device)}
    pairs = {
        "linear": (
            te.linear(width, features, parallel_mode="column", **place),
            nn.Linear(width, features),
        ),
        "rms_norm": (te.rms_norm(width, **place), RMSNorm(width)),
        "layer_norm": (te.layer_norm(width, **place), LayerNorm(width)),
        "norm_linear": (
            te.norm_linear(width, features, **place),
            _NormLinear(width, features),
        ),
    }
    return {name: _against(ours, right, device, name) for name, (ours, right) in pairs.items()}


def experts(device: torch.device) -> Figures:
    """Grouped linears, one expert without rows, against a product for each expert."""
    require("transformer_engine")
    tokens, width, features = SIZES
    counts = torch.tensor([0, 128, 32, tokens - 160])
    layer = te.grouped_linear(4, width, features, bias=False, device=device, dtype=torch.bfloat16)
    x, _, dy = _leaves(SIZES, torch.bfloat16, device)
    weight: Any = layer.weight
    ours = _products(lambda x, w: layer(x, counts.to(device)), x, weight, dy, parameter=weight)

    def each(x: Tensor, weights: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([part @ w.t() for part, w in zip(parts, weights.unbind(), strict=True)])

    right = _products(each, x.double(), weight.detach().double(), dy.double())
    return {"worst": _worst(ours, right, BFLOAT16, "grouped_linear")}


def recipes(device: torch.device) -> Figures:
    """Transformer Engine's linear layer in each recipe that the device has, against emulation."""
    require("transformer_engine")
    figures: Figures = {}
    for name, recipe in RECIPES.items():
        if why := _unserved(recipe):
            figures[name] = f"not on this device: {why}"
            continue
        x, weight, dy = _leaves(SIZES, torch.bfloat16, device)
        layer: Any = _linear(SIZES, recipe, device)
        with torch.no_grad():
            layer.weight.copy_(weight)
        state = state_for(recipe, device=device)
        multiply = partial(emulated_linear, recipe=recipe, state=state)
        for _ in range(3):
            with outer_autocast([recipe]):
                y = layer(x_in := x.clone().requires_grad_())
            theirs = [y, *torch.autograd.grad(y, (x_in, layer.weight), dy)]
            right = _products(multiply, x, weight, dy)
        figures[name] = _worst(theirs, right, ORDER, name)
    return figures


def times(device: torch.device) -> Figures:
    """Forward and backward of one linear layer, and the share of a product in bfloat16."""
    tokens, width, features = LARGE
    x, weight, dy = _leaves(LARGE, torch.bfloat16, device)
    rate = product_rate(device)
    works: dict[str, Callable[[], Any]] = {"torch": partial(_products, linear, x, weight, dy)}
    if is_installed("transformer_engine"):
        for name, recipe in {"bfloat16": None, **RECIPES}.items():
            if recipe is None or not _unserved(recipe):
                layer = _linear(LARGE, recipe, device)
                works[f"transformer_engine, {name}"] = partial(_step, layer, recipe, x, dy)
    figures: Figures = {"product, TFLOP/s": round(rate / 1e12, 1)}
    for name, work in works.items():
        took = milliseconds(work)
        share = round(6 * tokens * width * features / (took / 1e3) / rate, 3)
        figures[name] = {"ms": took, "of the limit": share}
    return figures


class _NormLinear(nn.Linear):
    """A linear layer of what an RMS norm gives, with the names of ``norm_linear``."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__(width, features)
        self.norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Both in turn."""
        return super().forward(self.norm(x))


def _step(layer: nn.Module, recipe: Recipe | None, x: Tensor, dy: Tensor) -> None:
    with outer_autocast([] if recipe is None else [recipe]):
        y = layer(x := x.detach().requires_grad_())
    torch.autograd.grad(y, (x, *layer.parameters()), dy)


def _linear(sizes: tuple[int, int, int], recipe: Recipe | None, device: torch.device) -> nn.Module:
    _, width, features = sizes
    options: dict[str, Any] = {"parallel_mode": "column", "bias": False, "device": device}
    layer: Any = te.linear(width, features, dtype=torch.bfloat16, **options)
    layer.recipe = recipe
    return layer


def _leaves(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, features = sizes
    random = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=random)
    x, dy = normal(tokens, width), normal(tokens, features)
    weight = normal(features, width) / width**0.5
    return x.to(device, dtype), weight.to(device, dtype), dy.to(device, dtype)


def _products(
    multiply: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    *,
    parameter: Tensor | None = None,
) -> list[Tensor]:
    """The output, and the gradients of ``x`` and of ``weight`` or ``parameter``."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_() if parameter is None else parameter
    y = multiply(x, weight)
    return [y, *torch.autograd.grad(y, (x, weight), dy)]


def _against(layer: nn.Module, right: nn.Module, device: torch.device, name: str) -> float:
    """The worst error of the output and all gradients, with the values of ``layer``."""
    right = right.to(device).double()
    right.load_state_dict(layer.state_dict())
    x, _, dy = _leaves(SIZES, torch.bfloat16, device)
    dy = dy if name.endswith("linear") else dy.repeat(1, 2)[:, : x.shape[1]]
    results = []
    for module, dtype in ((layer, _dtype(device)), (right, torch.float64)):
        given = x.detach().to(dtype).requires_grad_()
        y = module(given)
        parameters = [parameter for _, parameter in sorted(module.named_parameters())]
        gradients = torch.autograd.grad(y, (given, *parameters), dy.to(dtype))
        results.append([y, *gradients])
    ours, theirs = results
    return _worst(ours, theirs, BFLOAT16, name)


def _worst(ours: list[Tensor], right: list[Tensor], limit: float, name: str) -> float:
    worst = max(map(error_of, ours, right))
    assert worst <= limit, f"{name}: {worst} is above {limit}"
    return worst


def _dtype(device: torch.device) -> torch.dtype:
    """Torch's own norms sum gradients of 16 bits in 16 bits on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _unserved(recipe: Recipe) -> str:
    check = imported("transformer_engine.pytorch.quantization", "check_recipe_support", extra="te")
    try:
        check(to_transformer_engine(recipe))
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return ""


CHECKS = [
    Check("recipes: emulation against exact products", False, emulation),
    Check("transformer_engine: layers against ours", True, layers),
    Check("transformer_engine: grouped linears against a loop", True, experts),
    Check("transformer_engine: recipes against emulation", True, recipes),
    Check("low precision: times", True, times),
]
