"""The kernels of sequences, as functions of state-space layers take them, against plain torch.

In float64 these functions are plain torch on any device, so that it is what is right.

Dimensions: B rows, L tokens, H heads in G groups, P features of a head, N features of a state.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.checks import Check, Figures, error_of, milliseconds
from megablocks_core.layers.ssm import causal_conv1d, ssd_chunk_scan
from megablocks_core.layers.ssm.mixers.gated_norm import GatedRMSNorm

# Errors by norm of outputs and gradients that rounding to each dtype explains.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# Where functions ask whether Triton serves them.
_HOOKS = ("functions.ssd.operation", "functions.convolution.taps", "mixers.gated_norm_function")


class Shape(NamedTuple):
    """Sizes, and the sums of documents' lengths if there are any."""

    rows: int
    length: int
    heads: int
    groups: int
    features: int
    states: int
    documents: tuple[int, ...] = ()


SHAPES = [Shape(2, 37, 4, 2, 20, 18), Shape(1, 300, 4, 1, 64, 128, (0, 5, 5, 133, 290))]
LARGE = Shape(1, 8192, 64, 1, 64, 128)  # is timed


class Part(NamedTuple):
    """One of the functions.

    Attributes:
        draw: Its leaves in float32, by ``normal`` of sizes.
        narrow: Which of them get the dtype that is checked.
        call: What it gives of leaves, documents and a shape.
    """

    draw: Callable[[Shape, Callable[..., Tensor]], list[Tensor]]
    narrow: tuple[int, ...]
    call: Callable[[list[Tensor], Tensor | None, Shape], list[Tensor]]


def _scan_leaves(shape: Shape, normal: Callable[..., Tensor]) -> list[Tensor]:
    rows, length, heads, groups, features, states, _ = shape
    return [
        normal(rows, length, heads, features),
        normal(rows, length, heads).exp() / 10,
        -normal(heads).exp(),
        normal(rows, length, groups, states) / states**0.5,
        normal(rows, length, groups, states),
        normal(heads),
    ]


def _scan(leaves: list[Tensor], documents: Tensor | None, shape: Shape) -> list[Tensor]:
    *tokens, D = leaves
    y, final = ssd_chunk_scan(*tokens, D=D, cu_seqlens=documents)
    assert final is not None
    return [y, final]


def _convolution_leaves(shape: Shape, normal: Callable[..., Tensor]) -> list[Tensor]:
    channels = shape.heads * shape.features
    return [normal(shape.rows, shape.length, channels), normal(channels, 4), normal(channels)]


def _convolution(leaves: list[Tensor], documents: Tensor | None, shape: Shape) -> list[Tensor]:
    x, weight, bias = leaves
    return [causal_conv1d(x, weight, bias, activation=True, cu_seqlens=documents)[0]]


def _norm_leaves(shape: Shape, normal: Callable[..., Tensor]) -> list[Tensor]:
    tokens = (shape.rows, shape.length, shape.heads * shape.features)
    return [normal(*tokens), normal(*tokens), normal(tokens[-1])]


def _norm(leaves: list[Tensor], documents: Tensor | None, shape: Shape) -> list[Tensor]:
    y, z, weight = leaves
    norm = GatedRMSNorm(len(weight), groups=shape.groups, device=y.device, dtype=weight.dtype)
    return [norm.with_weight(y, z, weight)]


PARTS = {
    "the scan": Part(_scan_leaves, (0, 3, 4), _scan),
    "the convolution": Part(_convolution_leaves, (0, 1, 2), _convolution),
    "the gated norm": Part(_norm_leaves, (0, 1), _norm),
}


def leaves_of(part: Part, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Leaves on a device, some of them in a dtype."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return [
        drawn.to(device, dtype if place in part.narrow else torch.float32).requires_grad_()
        for place, drawn in enumerate(part.draw(shape, normal))
    ]


def results_of(part: Part, leaves: list[Tensor], shape: Shape) -> list[Tensor]:
    """What the part gives, and the gradients of all leaves."""
    device, documents = leaves[0].device, None
    if shape.documents:
        documents = torch.tensor(shape.documents, device=device)
    results = part.call(leaves, documents, shape)
    random = torch.Generator().manual_seed(1)
    gradients = [torch.randn(each.shape, generator=random).to(each) for each in results]
    return [*results, *torch.autograd.grad(results, leaves, gradients)]


def against_float64(part: Part, device: torch.device) -> Figures:
    """Outputs and gradients in each dtype against float64 of the same values."""
    figures = {}
    for dtype, limit in LIMITS.items():
        for shape in SHAPES:
            leaves = leaves_of(part, shape, dtype, device)
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            pairs = zip(*(results_of(part, each, shape) for each in (leaves, wide)), strict=True)
            worst = max(error_of(ours, right) for ours, right in pairs)
            assert worst <= limit, f"{dtype} {shape}: {worst} is above {limit}"
            figures[str(dtype)] = max(worst, figures.get(str(dtype), 0.0))
    return figures


def same_bits(device: torch.device) -> Figures:
    """Two runs give the same bits."""
    for part in PARTS.values():
        leaves = leaves_of(part, SHAPES[1], torch.bfloat16, device)
        one, other = (results_of(part, leaves, SHAPES[1]) for _ in range(2))
        assert all(map(torch.equal, one, other))
    return {}


def no_host_read(device: torch.device) -> Figures:
    """The host never waits for the device."""
    for part in PARTS.values():
        leaves = leaves_of(part, LARGE, torch.bfloat16, device)
        _there_and_back(part, leaves)
        torch.cuda.set_sync_debug_mode("error")
        try:
            _there_and_back(part, leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {}


def times(device: torch.device) -> Figures:
    """Forward and backward in milliseconds, by kernels and by plain torch on the same GPU."""
    figures = {}
    for name, part in PARTS.items():
        leaves = leaves_of(part, LARGE, torch.bfloat16, device)
        work = partial(_there_and_back, part, leaves)
        figures[name] = {"kernels": milliseconds(work)}
        with plain():
            figures[name]["plain torch"] = milliseconds(work, warm_ups=2, rounds=5)
    return {f"{LARGE}, bfloat16": figures}


@contextmanager
def plain() -> Iterator[None]:
    """No function takes its kernels."""
    with ExitStack() as stack:
        for hook in _HOOKS:
            module = import_module(f"megablocks_core.layers.ssm.{hook}")
            stack.enter_context(patch.object(module, "triton_serves", lambda *tensors: False))
        yield


def _there_and_back(part: Part, leaves: list[Tensor]) -> None:
    results = part.call(leaves, None, LARGE)
    torch.autograd.grad(results, leaves, [torch.ones_like(each) for each in results])


CHECKS = [
    *(
        Check(f"sequences: {name} against float64", True, partial(against_float64, part))
        for name, part in PARTS.items()
    ),
    Check("sequences: the same bits in each run", True, same_bits),
    Check("sequences: nothing is read on the host", True, no_host_read),
    Check("sequences: times", True, times),
]
