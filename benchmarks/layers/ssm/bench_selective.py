"""The selective scan against transformers' and mamba_ssm's in torch, on a CPU.

A step is y and its gradients in x, dt, A, B, C and D. The peers keep every token's state, and
their backward writes zeros of all tokens for each: their time grows with the square of the length.
The one of mamba_ssm is left out where that is not installed (``tools/oracles.sh mamba``).

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
from torch.nn.functional import softplus
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import Times, report, take_turns
from megablocks_core.layers.ssm import selective_scan
from tests.layers.ssm.mamba_ssm_oracle import mamba_ssm

_NAME = "layers/ssm/selective"

Scan = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of one scan."""

    length: int
    channels: int
    state: int

    @property
    def case(self) -> dict[str, int | str]:
        """For the report."""
        return dict(zip(("L", "D", "N"), self, strict=True))


def _ours(*inputs: Tensor) -> Tensor:
    *others, D = inputs
    return selective_scan(*others, D=D, return_final_state=False)[0]


def _turned(function: Scan) -> Scan:
    """A function of [B D L] as one of [B L D]."""

    def call(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        return function(x.mT, dt.mT, A, B.mT, C.mT, D=D).mT

    return call


def _peers() -> dict[str, Scan]:
    """By what they are called in reports."""
    found = {"transformers mamba_selective_scan": _turned(mamba_selective_scan)}
    reference = mamba_ssm("ops.selective_scan_interface")
    if reference is not None:
        found["mamba_ssm selective_scan_ref"] = _turned(reference.selective_scan_ref)
    return found


def _inputs(sizes: Sizes) -> list[Tensor]:
    """x, dt, A, B, C and D, and the gradient in y."""
    torch.manual_seed(0)
    L, D, N = sizes
    found = [
        torch.randn(1, L, D),
        softplus(torch.randn(1, L, D) - 4),
        -torch.arange(1.0, N + 1).repeat(D, 1),
        torch.randn(1, L, N),
        torch.randn(1, L, N),
        torch.ones(D),
    ]
    return [x.requires_grad_() for x in found] + [torch.randn(1, L, D)]


def _step(function: Scan, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    *leaves, dy = inputs
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def bench_peer(peer: str, sizes: Sizes, *, threads: int) -> None:
    """Steps of both in turns."""
    torch.set_num_threads(threads)
    inputs = _inputs(sizes)
    ours, theirs = partial(_step, _ours, inputs), partial(_step, _peers()[peer], inputs)
    for mine, their in zip(ours(), theirs(), strict=True):
        assert (mine - their).norm() < 1e-4 * their.norm()
    times = take_turns(ours, theirs, rounds=7)
    report(times, benchmark=_NAME, peer=peer, case=sizes.case, threads=threads)


def bench_memory(peer: str, sizes: Sizes) -> None:
    """The peak of one step against that of a peer."""
    module = "benchmarks.layers.ssm.bench_selective"
    report_peaks(
        peak_of(module, "ours", *sizes),
        peak_of(module, peer, *sizes),
        benchmark=_NAME,
        whom=peer,
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
    function = _ours if side == "ours" else _peers()[side]
    inputs, few = _inputs(sizes), _inputs(sizes._replace(length=8))
    print_peak(lambda: _step(function, inputs)[1:], warm_up=lambda: _step(function, few))


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, *numbers = sys.argv[1:]
        torch.set_num_threads(1)
        _print_peak(side, Sizes(*map(int, numbers)))
        return
    sizes = Sizes(128, 256, 16)
    for peer in _peers():
        for threads in (1, 2):
            bench_peer(peer, sizes, threads=threads)
        bench_memory(peer, Sizes(256, 512, 16))
    for length in (4096, 16384):
        bench_lengths(Sizes(1024, 512, 16), Sizes(length, 512, 16))


if __name__ == "__main__":
    main()
