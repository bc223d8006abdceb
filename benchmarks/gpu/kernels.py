"""The kernels of layers against their twins and ``grouped_mm``.

On a CPU ``kernels_for`` gives the twins, so that what is checked there is the checks themselves
and the twins' low precisions.

Dimensions: T tokens, k slots a token, N = T k places, e experts, O rows and I columns of an
expert's matrix.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.checks import Check, Figures, error_of, milliseconds
from megablocks_core.layers.kernels import grouped_product, kernels_for, permute, unpermute
from megablocks_core.layers.kernels.plain import Plain

# Errors by norm that rounding once or twice to each dtype explains.
LIMITS = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}

# Tokens, slots, experts, O and I: first what fits no tile and no block, then what does.
SHAPES = [(0, 2, 3, 16, 8), (1, 1, 1, 3, 5), (77, 3, 4, 33, 129), (300, 2, 5, 70, 1100)]
EVEN = (512, 2, 8, 256, 512)
LARGE = (8192, 2, 64, 1024, 2048)  # on a GPU alone


class Case(NamedTuple):
    """Tokens, their order by expert, the experts' matrices, and gradients of results."""

    x: Tensor
    rows: Tensor
    places: Tensor
    weights: Tensor
    counts: Tensor
    matrices: Tensor
    dy: Tensor
    dx: Tensor


def case_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    holes: bool = True,
    idle: bool = True,
) -> Case:
    """Random tokens; some slots go nowhere with ``holes``, expert 0 gets none if ``idle``."""
    num_tokens, num_slots, num_experts, num_outputs, num_inputs = shape
    random = torch.Generator().manual_seed(0)
    first = 1 if idle and num_experts > 1 else 0
    experts = torch.randint(first, num_experts, (num_tokens * num_slots,), generator=random)
    if holes:
        experts[torch.rand(experts.shape, generator=random) < 0.1] = num_experts
    keys, slots = experts.sort(stable=True)
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))
    places[experts == num_experts] = -1
    rows = torch.where(keys == num_experts, -1, slots // num_slots)
    counts = (experts == torch.arange(num_experts)[:, None]).sum(1)
    normal = partial(torch.randn, generator=random)
    floats = (
        normal(num_tokens, num_inputs),
        normal(num_experts, num_outputs, num_inputs) / num_inputs**0.5,
        normal(len(rows), num_outputs),
        normal(num_tokens, num_inputs),
    )
    x, matrices, dy, dx = (each.to(device, dtype) for each in floats)
    weights = torch.rand(len(rows), generator=random).to(device)
    integers = (each.to(device) for each in (rows, places.view(num_tokens, num_slots), counts))
    rows, places, counts = integers
    return Case(x, rows, places, weights, counts, matrices, dy, dx)


def moved(case: Case, **given: Any) -> list[Tensor]:
    """Permuted and back, weighted both times, and all gradients."""
    x, weights = (each.clone().requires_grad_() for each in (case.x, case.weights))
    permuted = permute(x, case.rows, case.places, weights=weights, **given)
    back = unpermute(permuted, case.places, case.rows, weights=weights, **given)
    return [permuted, back, *torch.autograd.grad(back, (x, weights), case.dx)]


def multiplied(case: Case, **given: Any) -> list[Tensor]:
    """The grouped product and its gradients."""
    x, matrices = (each.clone().requires_grad_() for each in (case.x, case.matrices))
    y = grouped_product(x, case.rows, matrices, case.counts, places=case.places, **given)
    return [y, *torch.autograd.grad(y, (x, matrices), case.dy)]


def against_twins(work: Any, device: torch.device) -> Figures:
    """``work`` against the twins in float64."""
    figures = {}
    for dtype, limit in LIMITS.items():
        for shape in [*SHAPES, EVEN, *([LARGE] if device.type == "cuda" else [])]:
            case = case_of(shape, dtype, device)
            wide = Case(*(each.double() if each.is_floating_point() else each for each in case))
            results = zip(work(case), work(wide, kernels=Plain()), strict=True)
            worst = max(error_of(ours, twin) for ours, twin in results)
            assert worst <= limit, f"{dtype} {shape}: {worst} is above {limit}"
            figures[str(dtype)] = max(worst, figures.get(str(dtype), 0.0))
    return figures


def against_grouped_mm(device: torch.device) -> Figures:
    """The grouped product against torch's, which takes permuted rows and no empty places."""
    case = case_of(EVEN, torch.bfloat16, device, holes=False)
    return {
        name: _within(ours, peer, 2 * LIMITS[torch.bfloat16])
        for name, ours, peer in zip(("y", "dx", "dw"), multiplied(case), peer_of(case), strict=True)
    }


def peer_of(case: Case) -> list[Tensor]:
    """What ``multiplied`` computes, with torch's own parts."""
    x, matrices = (each.clone().requires_grad_() for each in (case.x, case.matrices))
    ends = case.counts.cumsum(0).int()
    y = F.grouped_mm(x[case.rows], matrices.transpose(1, 2), offs=ends)
    return [y, *torch.autograd.grad(y, (x, matrices), case.dy)]


def same_bits(device: torch.device) -> Figures:
    """Two runs give the same bits."""
    case = case_of(EVEN, torch.bfloat16, device)
    for work in (moved, multiplied):
        assert all(map(torch.equal, work(case), work(case)))
    return {}


def no_host_read(device: torch.device) -> Figures:
    """The host never waits for the device."""
    case = case_of(EVEN, torch.bfloat16, device)
    works = [partial(work, case) for work in (moved, multiplied)]
    for work in works:
        work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for work in works:
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {}


def times(device: torch.device) -> Figures:
    """Forward and backward, in milliseconds, ours and with torch's own parts."""
    figures = {}
    for num_experts in (8, 64):
        shape = (*LARGE[:2], num_experts, *LARGE[3:])
        case = case_of(shape, torch.bfloat16, device, holes=False, idle=False)
        kernels = kernels_for(case.x)
        figures[f"{num_experts} experts, top-2, T=8192 I=2048 O=1024"] = {
            "grouped_product": milliseconds(partial(multiplied, case)),
            "index, grouped_mm": milliseconds(partial(peer_of, case)),
            "take": milliseconds(partial(kernels.take, case.x, case.rows)),
            "index_select": milliseconds(partial(case.x.index_select, 0, case.rows)),
            "permute and unpermute": milliseconds(partial(moved, case)),
            "their twins": milliseconds(partial(moved, case, kernels=Plain())),
        }
    return figures


def _within(ours: Tensor, right: Tensor, limit: float) -> float:
    error = error_of(ours, right)
    assert error <= limit, f"{error} is above {limit}"
    return error


CHECKS = [
    Check("kernels: permute and unpermute against twins", False, partial(against_twins, moved)),
    Check("kernels: grouped_product against twins", False, partial(against_twins, multiplied)),
    Check("kernels: grouped_product against grouped_mm", False, against_grouped_mm),
    Check("kernels: the same bits in each run", True, same_bits),
    Check("kernels: nothing is read on the host", True, no_host_read),
    Check("kernels: times", True, times),
]
