"""Every back end of attention against the twin, and its times against torch and the limit.

Dimensions: B rows, T tokens, N query heads, K key heads, D features of a head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.checks import (
    Absent,
    Check,
    Figures,
    error_of,
    milliseconds,
    product_rate,
    require,
)
from megablocks_core.layers.attention import AttentionSpec, attention
from megablocks_core.layers.attention.backends import CAPABILITIES
from megablocks_core.layers.attention.backends.capabilities import lacking, needs_of
from megablocks_core.parallel.optional import is_installed

# Errors by norm of outputs and gradients that rounding to each dtype explains.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

TOKENS, HEADS, KV_HEADS, WIDTH = 300, 8, 2, 64
LARGE = (1, 8192, 32, 8, 128)  # B, T, N, K, D: is timed

Leaves = tuple[Tensor, ...]


def _documents(device: torch.device) -> dict[str, Tensor | int]:
    sums = torch.tensor([0, 5, 5, 133, 290], dtype=torch.int32, device=device)
    return {"cu_seqlens": sums, "max_seqlen": 157}


def _padded(device: torch.device) -> dict[str, Tensor | int]:
    places = torch.tensor([0, 8, 8, 136, 296], dtype=torch.int32, device=device)
    return {**_documents(device), "cu_seqlens_padded": places}


# What specs ask for, by name; a sink is the leaf after q, k and v.
REQUESTS: dict[str, Callable[[torch.device], dict]] = {
    "rows": lambda device: {},
    "all keys": lambda device: {"mask": "full"},
    "documents": _documents,
    "documents with pads": _padded,
    "a window": lambda device: {"window": (40, None)},
    "a window in documents": lambda device: {**_documents(device), "window": (40, 0)},
    "a soft cap": lambda device: {"soft_cap": 5.0},
    "a scale": lambda device: {"scale": 0.3},
    "sinks": lambda device: {"sinks": True},
    "sinks in documents": lambda device: {**_documents(device), "sinks": True},
}


def against_twin(backend: str, device: torch.device) -> Figures:
    """The worst error by request and dtype, over the output and, where served, all gradients."""
    require(CAPABILITIES[backend].module)
    figures = {}
    dtypes = LIMITS if device.type == "cuda" else {torch.float32: LIMITS[torch.float32]}
    for request, options in REQUESTS.items():
        for dtype, limit in dtypes.items():
            leaves = _leaves((1, TOKENS, HEADS, KV_HEADS, WIDTH), dtype, device)
            learns = device.type == "cuda" or CAPABILITIES[backend].cpu_gradients
            given = options(device)
            if not _serves(backend, leaves, given, learns=learns):
                continue
            ours = _results(leaves, given, backend, learns=learns)
            right = _results([x.double() for x in leaves], given, "naive", learns=learns)
            worst = max(map(error_of, ours, right))
            assert worst <= limit, f"{request}, {dtype}: {worst} is above {limit}"
            figures[f"{request}, {str(dtype).removeprefix('torch.')}"] = worst
    if not figures:
        raise Absent(f"{backend} serves nothing on this device")
    return figures


def times(device: torch.device) -> Figures:
    """Forward and backward of causal rows and of packed documents, and the share of the limit.

    The limit is what a large product of matrices reaches on this device; products that the mask
    hides are not counted.
    """
    rows, tokens, heads, _, width = LARGE
    leaves = _leaves(LARGE, torch.bfloat16, device)
    sums = torch.arange(0, tokens + 1, tokens // 8, dtype=torch.int32, device=device)
    cases = {"rows": ({}, 1), "8 documents": ({"cu_seqlens": sums, "max_seqlen": tokens // 8}, 8)}
    rate = product_rate(device)
    figures: Figures = {"product, TFLOP/s": round(rate / 1e12, 1)}
    for case, (options, parts) in cases.items():
        # Two products forward and five backward, of which the mask leaves one half.
        work = 7 * rows * heads * tokens**2 * width / parts
        for backend in [name for name in CAPABILITIES if name != "naive"]:
            if not _installed(backend) or not _serves(backend, leaves, options, learns=True):
                continue
            took = milliseconds(partial(_results, leaves, options, backend, learns=True))
            share = round(work / (took / 1e3) / rate, 3)
            figures[f"{case}, {backend}"] = {"ms": took, "of the limit": share}
    return figures


def _leaves(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Leaves:
    rows, tokens, heads, kv_heads, width = shape
    random = torch.Generator().manual_seed(0)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, width), (heads, width)]
    q, k, v, dy = (torch.randn(rows, tokens, *size, generator=random) for size in sizes)
    sinks = torch.randn(heads, generator=random)
    return tuple(x.to(device, dtype) for x in (q, k, v, sinks, dy))


def _spec(options: dict, sinks: Tensor) -> AttentionSpec:
    return AttentionSpec(**{**options, **({"sinks": sinks} if "sinks" in options else {})})


def _results(leaves: Leaves | list[Tensor], options: dict, backend: str, *, learns: bool):
    q, k, v, sinks = (x.detach().clone().requires_grad_(learns) for x in leaves[:4])
    y = attention(q, k, v, _spec(options, sinks), backend=backend)
    if not learns:
        return [y]
    wanted = [q, k, v, sinks] if "sinks" in options else [q, k, v]
    return [y, *torch.autograd.grad(y, wanted, leaves[4])]


def _serves(backend: str, leaves: Leaves, options: dict, *, learns: bool) -> bool:
    q, k, v, sinks = (x.detach().requires_grad_(learns) for x in leaves[:4])
    return not lacking(backend, needs_of(q, k, v, _spec(options, sinks)), q, v)


def _installed(backend: str) -> bool:
    module = CAPABILITIES[backend].module
    return module is None or is_installed(module)


CHECKS = [
    *(
        Check(
            f"attention: {backend} against the twin",
            not able.cpu,
            partial(against_twin, backend),
        )
        for backend, able in CAPABILITIES.items()
        if backend != "naive"
    ),
    Check("attention: times", True, times),
]
