"""The gated delta rule against transformers' ``torch_chunk_gated_delta_rule``, on a CPU.

A step is y and its gradients in q, k, v, g and beta, in chunks of 64 tokens on both sides.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond inputs and
gradients, each of a process of its own that does one step. In the lines about lengths the peer is
ours at another length, and the ratio is that of times a token.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import Times, report, take_turns
from megablocks_core.layers.ssm import gated_delta_rule

_NAME, _PEER = "layers/ssm/delta", "transformers torch_chunk_gated_delta_rule"

Rule = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of one sequence."""

    length: int
    heads: int
    keys: int
    values: int

    @property
    def case(self) -> dict[str, int | str]:
        """For the report."""
        return dict(zip(("L", "H", "K", "V"), self, strict=True))


_SMALL, _LARGE = Sizes(4096, 8, 64, 64), Sizes(2048, 16, 128, 128)


def _ours(*inputs: Tensor) -> Tensor:
    return gated_delta_rule(*inputs, return_final_state=False)[0]


def _theirs(*inputs: Tensor) -> Tensor:
    return torch_chunk_gated_delta_rule(*inputs)[0]


def _inputs(sizes: Sizes) -> list[Tensor]:
    """q, k, v, g and beta, and the gradient in y."""
    torch.manual_seed(0)
    L, H, K, V = sizes
    found = [
        normalize(torch.randn(1, L, H, K), dim=-1),
        normalize(torch.randn(1, L, H, K), dim=-1),
        torch.randn(1, L, H, V),
        -torch.rand(1, L, H) / 8,
        torch.rand(1, L, H),
    ]
    return [x.requires_grad_() for x in found] + [torch.randn(1, L, H, V)]


def _step(function: Rule, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    *leaves, dy = inputs
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def bench_transformers(sizes: Sizes, *, threads: int) -> None:
    """Steps of both in turns."""
    torch.set_num_threads(threads)
    inputs = _inputs(sizes)
    steps = [partial(_step, function, inputs) for function in (_ours, _theirs)]
    for mine, their in zip(*(step() for step in steps), strict=True):
        assert (mine - their).norm() < 1e-4 * their.norm()
    times = take_turns(*steps, rounds=7)
    report(times, benchmark=_NAME, peer=_PEER, case=sizes.case, threads=threads)


def bench_memory(sizes: Sizes) -> None:
    """The peak of one step against that of transformers."""
    module = "benchmarks.layers.ssm.bench_delta"
    report_peaks(
        peak_of(module, "ours", *sizes),
        peak_of(module, "theirs", *sizes),
        benchmark=_NAME,
        whom=_PEER,
        case=sizes.case,
        limit=None,
        threads=1,
    )


def bench_lengths(short: Sizes, long: Sizes) -> None:
    """The time of a token in a long sequence against that in a short one."""
    torch.set_num_threads(1)
    steps = [partial(_step, _ours, _inputs(sizes)) for sizes in (long, short)]
    times = take_turns(*steps, rounds=7)
    each = Times(
        [time / long.length for time in times.ours], [time / short.length for time in times.peer]
    )
    whom = f"ours at L={short.length}, a token"
    report(each, benchmark=_NAME, peer=whom, case=long.case, limit=1.1)


def _print_peak(side: str, sizes: Sizes) -> None:
    function = _ours if side == "ours" else _theirs
    inputs, few = _inputs(sizes), _inputs(sizes._replace(length=64))
    print_peak(lambda: _step(function, inputs)[1:], warm_up=lambda: _step(function, few))


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, *numbers = sys.argv[1:]
        torch.set_num_threads(1)
        _print_peak(side, Sizes(*map(int, numbers)))
        return
    for sizes in (_SMALL, _LARGE):
        for threads in (1, 2):
            bench_transformers(sizes, threads=threads)
        bench_memory(sizes)
    for length in (4096, 16384):
        bench_lengths(_SMALL._replace(length=1024), _SMALL._replace(length=length))


if __name__ == "__main__":
    main()
