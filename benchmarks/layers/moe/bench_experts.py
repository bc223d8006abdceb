"""Experts against three dense linear layers and against batched products.

A step is a forward and a backward pass over T k rows. The three layers have the FLOPs of the
experts and nothing between them. With routing redrawn, each step has other counts; with
persistent gradients both sides add to gradients that are there.
"""

from itertools import cycle

import torch
from torch import Tensor, nn

from benchmarks.timing import Work, report, take_turns
from megablocks_core.layers.moe.dispatch import Dispatched
from megablocks_core.layers.moe.dispatch.assignment import by_expert
from megablocks_core.layers.moe.experts import GroupedExperts

_NAME = "layers/moe/experts"
_TOKENS, _HIDDEN, _FFN, _TOP_K = 4096, 512, 1024, 2
_DRAWS = 40
# By (persistent gradients and fixed counts, dtype, number of experts).
_LIMITS = {
    (False, torch.bfloat16, 8): 1.25,
    (False, torch.bfloat16, 64): 2.0,
    (True, torch.bfloat16, 8): 1.0,
    (True, torch.bfloat16, 64): 1.5,
    (True, torch.float32, 8): 1.0,
    (True, torch.float32, 64): 1.5,
}


def bench_against_dense(threads: int) -> None:
    """Experts against three linear layers."""
    for (fixed, dtype, num_experts), limit in _LIMITS.items():
        experts = GroupedExperts(
            num_experts, _HIDDEN, _FFN, dtype=dtype, persistent_gradients=fixed
        )
        draws = [
            _dispatched(num_experts, dtype, fixed=fixed) for _ in range(1 if fixed else _DRAWS)
        ]
        _assert_like_loop(experts, draws[0])
        pair = _step(experts, draws, keeps=fixed), _dense_step(dtype, keeps=fixed)
        counts = "fixed" if fixed else "redrawn"
        case = {"experts": num_experts, "dtype": str(dtype), "counts": counts}
        times = take_turns(*pair, rounds=9)
        peer = "three nn.Linear"
        report(times, benchmark=_NAME, peer=peer, case=case, limit=limit, threads=threads)


def bench_against_batched(threads: int) -> None:
    """Experts with balanced counts against the batched products of the same weights."""
    for num_experts in (8, 64):
        experts = GroupedExperts(num_experts, _HIDDEN, _FFN, dtype=torch.bfloat16)
        dispatched = _dispatched(num_experts, torch.bfloat16, fixed=True)
        _assert_like_loop(experts, dispatched)
        x = dispatched.x[dispatched.rows].detach().requires_grad_()

        def batched(experts: GroupedExperts = experts, x: Tensor = x) -> None:
            experts.zero_grad()
            x.grad = None
            assert experts.gate_proj is not None
            x_eCH = x.view(len(experts.up_proj), -1, _HIDDEN)
            gate, up = (
                torch.bmm(x_eCH, weight.transpose(1, 2))
                for weight in (experts.gate_proj, experts.up_proj)
            )
            hidden = nn.functional.silu(gate) * up
            y = torch.bmm(hidden, experts.down_proj.transpose(1, 2))
            y.backward(torch.ones_like(y))

        case = {"experts": num_experts, "dtype": "torch.bfloat16", "counts": "fixed"}
        times = take_turns(_step(experts, [dispatched], keeps=False), batched, rounds=9)
        peer = "torch.bmm"
        report(times, benchmark=_NAME, peer=peer, case=case, limit=0.9, threads=threads)


def _dispatched(num_experts: int, dtype: torch.dtype, *, fixed: bool) -> Dispatched:
    if fixed:
        first = torch.arange(_TOKENS) % num_experts
        indices = torch.stack([first, (first + 1) % num_experts], dim=1)
    else:
        indices = torch.rand(_TOKENS, num_experts).topk(_TOP_K).indices
    order = by_expert(indices, num_experts)
    return Dispatched(
        torch.randn(_TOKENS, _HIDDEN, dtype=dtype, requires_grad=True),
        order.rows,
        torch.rand(_TOKENS * _TOP_K, requires_grad=True),
        order.counts,
        order.counts.tolist(),
        places=order.places,
    )


def _assert_like_loop(experts: GroupedExperts, dispatched: Dispatched) -> None:
    options = {"device": "meta", "dtype": experts.up_proj.dtype}
    loop = GroupedExperts(experts.num_experts, _HIDDEN, _FFN, form="loop", **options)
    loop.load_state_dict(experts.state_dict(), assign=True)
    mine, theirs = experts(dispatched), loop(dispatched)
    tolerance = 1e-5 if mine.dtype == torch.float32 else 2e-2
    assert (mine - theirs).norm() <= tolerance * theirs.norm()


def _step(experts: GroupedExperts, draws: list[Dispatched], *, keeps: bool) -> Work:
    turns, dy = cycle(draws), torch.randn(_TOKENS * _TOP_K, _HIDDEN, dtype=experts.up_proj.dtype)

    def step() -> None:
        if not keeps:
            experts.zero_grad()
        dispatched = next(turns)
        dispatched.x.grad = None
        experts(dispatched).backward(dy)

    return step


def _dense_step(dtype: torch.dtype, *, keeps: bool) -> Work:
    gate, up = (nn.Linear(_HIDDEN, _FFN, bias=False, dtype=dtype) for _ in range(2))
    down = nn.Linear(_FFN, _HIDDEN, bias=False, dtype=dtype)
    layers, rows = nn.ModuleList([gate, up, down]), _TOKENS * _TOP_K
    x = torch.randn(rows, _HIDDEN, dtype=dtype, requires_grad=True)
    hidden = torch.randn(rows, _FFN, dtype=dtype, requires_grad=True)
    dhidden, dy = torch.randn(rows, _FFN, dtype=dtype), torch.randn(rows, _HIDDEN, dtype=dtype)

    def step() -> None:
        if not keeps:
            layers.zero_grad()
        x.grad = hidden.grad = None
        torch.autograd.backward([gate(x), up(x), down(hidden)], [dhidden, dhidden, dy])

    return step


def main() -> None:
    """Print one JSON line a case."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bench_against_dense(threads)
        bench_against_batched(threads)


if __name__ == "__main__":
    main()
