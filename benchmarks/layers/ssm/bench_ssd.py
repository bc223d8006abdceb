"""The chunked scan of Mamba-2 against mamba_ssm's minimal reference, and its products alone.

Run it with the Python that ``tools/oracles.sh mamba`` prints; without mamba_ssm the reference is
left out. A step is y and its gradients in x, dt, A, B and C. The reference knows no groups of
heads: it is handed views of B and C that repeat them, and ``dt x`` in place of x.

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

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import Times, report, take_turns
from megablocks_core.layers.ssm import ssd_chunk_scan
from tests.layers.ssm.mamba_ssm_oracle import mamba_ssm

_NAME, _PEER = "layers/ssm/ssd", "mamba_ssm ssd_minimal_discrete"
_CHUNK = 64


class Sizes(NamedTuple):
    """Of one scan."""

    length: int
    heads: int
    features: int
    state: int

    @property
    def case(self) -> dict[str, int | str]:
        """For the report."""
        return {"L": self.length, "H": self.heads, "P": self.features, "N": self.state}


_SMALL, _LARGE = Sizes(4096, 16, 32, 64), Sizes(4096, 64, 64, 128)


def bench_reference(sizes: Sizes, *, threads: int) -> None:
    """Steps of both in turns."""
    reference = mamba_ssm("modules.ssd_minimal")
    if reference is None:
        return
    torch.set_num_threads(threads)
    *inputs, dy = _inputs(sizes)
    ours, peer = partial(_ours, *inputs, dy), partial(_peer, *inputs, dy)
    for mine, theirs in zip(ours(), peer(), strict=True):
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()
    times = take_turns(ours, peer, rounds=7)
    report(times, benchmark=_NAME, peer=_PEER, case=sizes.case, limit=0.33, threads=threads)


def bench_products(sizes: Sizes, *, threads: int) -> None:
    """Steps against the matrix products in them, on as large blocks."""
    torch.set_num_threads(threads)
    ours, peer = partial(_ours, *_inputs(sizes)), _products(sizes)
    times = take_turns(ours, peer, rounds=11)
    whom = "its own matrix products"
    limit = 2.5 if sizes == _SMALL else None
    report(times, benchmark=_NAME, peer=whom, case=sizes.case, limit=limit, threads=threads)


def bench_lengths(short: int, long: int) -> None:
    """The time of a token in a long sequence against that in a short one."""
    torch.set_num_threads(1)
    steps = [partial(_ours, *_inputs(_SMALL._replace(length=length))) for length in (long, short)]
    times = take_turns(*steps, rounds=7)
    each = Times([time / long for time in times.ours], [time / short for time in times.peer])
    case = _SMALL._replace(length=long).case
    report(each, benchmark=_NAME, peer=f"ours at L={short}, a token", case=case, limit=1.1)


def bench_memory(sizes: Sizes) -> None:
    """The peak of one step against that of the reference."""
    if mamba_ssm("modules.ssd_minimal") is None:
        return
    module = "benchmarks.layers.ssm.bench_ssd"
    report_peaks(
        peak_of(module, "ours", *sizes),
        peak_of(module, "peer", *sizes),
        benchmark=_NAME,
        whom=_PEER,
        case=sizes.case,
        limit=0.333,
        threads=1,
    )


def _inputs(sizes: Sizes) -> list[Tensor]:
    """x, dt, A, B and C of one group, and the gradient in y."""
    torch.manual_seed(0)
    L, H, P, N = sizes
    found = [
        torch.randn(1, L, H, P),
        softplus(torch.randn(1, L, H) - 4),
        -torch.rand(H).exp(),
        torch.randn(1, L, 1, N),
        torch.randn(1, L, 1, N),
    ]
    return [x.requires_grad_() for x in found] + [torch.randn(1, L, H, P)]


def _ours(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y, _ = ssd_chunk_scan(x, dt, A, B, C, chunk_size=_CHUNK, return_final_state=False)
    return y.detach(), *torch.autograd.grad(y, (x, dt, A, B, C), dy)


def _peer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    reference = mamba_ssm("modules.ssd_minimal").ssd_minimal_discrete
    heads = x.shape[2]
    repeated = [part.expand(-1, -1, heads, -1) for part in (B, C)]
    y, _ = reference(x * dt[..., None], dt * A, *repeated, _CHUNK)
    return y.detach(), *torch.autograd.grad(y, (x, dt, A, B, C), dy)


def _products(sizes: Sizes) -> Callable[[], None]:
    """Those of one step, each of the whole sequence in one call, into memory that is there."""
    L, H, P, N = sizes
    q, c = _CHUNK, L // _CHUNK
    B, C, dB, dC = (torch.randn(c, q, N) for _ in range(4))
    left, entered, read, dleft = (torch.randn(c, q, H * P) for _ in range(4))
    state, dstate, added, dread = (torch.randn(c, H * P, N) for _ in range(4))
    meets, dmeets = (torch.randn(c, q, q) for _ in range(2))
    matrix, dmatrix, crossing = (torch.randn(c * H, q, q) for _ in range(3))
    moved, dmoved, met, dmet = (torch.randn(c * H, q, P) for _ in range(4))

    def both() -> None:
        torch.bmm(C, B.mT, out=meets)
        torch.bmm(left.mT, B, out=added)
        torch.bmm(C, state.mT, out=read)

    def step() -> None:
        both()
        torch.bmm(matrix, moved, out=met)
        both()
        torch.bmm(dmet, moved.mT, out=dmatrix)
        torch.bmm(matrix.mT, dmet, out=dmoved)
        torch.mm(dmatrix.view(-1, q), meets[0], out=crossing.view(-1, q))
        torch.bmm(entered.mT, C, out=dread)
        torch.bmm(B, dstate.mT, out=dleft)
        torch.bmm(left, dstate, out=dB)
        torch.bmm(entered, state, out=dC)
        dB.baddbmm_(dmeets.mT, C)
        dC.baddbmm_(dmeets, B)

    return step


def _print_peak(side: str, sizes: Sizes) -> None:
    step = _ours if side == "ours" else _peer
    inputs, few = _inputs(sizes), _inputs(sizes._replace(length=_CHUNK))
    print_peak(lambda: step(*inputs)[1:], warm_up=lambda: step(*few))


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, *numbers = sys.argv[1:]
        _print_peak(side, Sizes(*map(int, numbers)))
        return
    for threads in (1, 2):
        for sizes in (_SMALL, _LARGE):
            bench_reference(sizes, threads=threads)
            bench_products(sizes, threads=threads)
    bench_memory(_SMALL)
    bench_memory(_LARGE)
    for length in (4096, 16384, 65536):
        bench_lengths(1024, length)


if __name__ == "__main__":
    main()
