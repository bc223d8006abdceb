"""The Mamba-2 mixer against that of transformers, on CPU in torch on both sides.

A step is y and its gradients in x and every parameter. Theirs is timed with its default chunks of
256 tokens and with chunks of 64.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond inputs and
gradients, each of a process of its own that does one step. In the lines about lengths the peer is
ours at another length, and the ratio is that of times a token. With ``freed`` "kept" the allocator
gives nothing back to the system; else it does with tensors above 32 MiB, and long rows alone have
such.
"""

import ctypes
import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import Times, report, take_turns
from megablocks_core.layers.ssm import Mamba2

_NAME = "layers/ssm/mamba2"


class Sizes(NamedTuple):
    """Of one mixer and one row."""

    length: int
    hidden: int
    heads: int
    features: int
    state: int

    @property
    def case(self) -> dict[str, int | str]:
        """For the report."""
        return dict(zip(("L", "D", "H", "P", "N"), self, strict=True))


_SIZES = Sizes(4096, 256, 16, 32, 64)


def bench_transformers(sizes: Sizes, *, chunk: int, threads: int) -> None:
    """Steps of both in turns."""
    torch.set_num_threads(threads)
    ours, theirs, x, dy = _ours(sizes), _theirs(sizes, chunk), *_row(sizes)
    theirs.load_state_dict(ours.state_dict())
    steps = [partial(_step, mixer, x, dy) for mixer in (ours, theirs)]
    for mine, their in zip(*(step() for step in steps), strict=True):
        assert (mine - their).norm() < 1e-4 * their.norm()
    times = take_turns(*steps, rounds=7)
    whom = f"transformers, chunks of {chunk}"
    report(times, benchmark=_NAME, peer=whom, case=sizes.case, limit=0.5, threads=threads)


def bench_memory(sizes: Sizes, *, chunk: int) -> None:
    """The peak of one step against that of transformers."""
    module = "benchmarks.layers.ssm.bench_mamba2"
    report_peaks(
        peak_of(module, "ours", chunk, *sizes),
        peak_of(module, "theirs", chunk, *sizes),
        benchmark=_NAME,
        whom=f"transformers, chunks of {chunk}",
        case=sizes.case,
        limit=0.5,
        threads=1,
    )


def bench_lengths(short: int, long: int, *, freed: str) -> None:
    """The time of a token in a long row against that in a short one."""
    torch.set_num_threads(1)
    if freed == "kept":
        _keep_freed_memory()
    mixer = _ours(_SIZES)
    steps = [
        partial(_step, mixer, *_row(_SIZES._replace(length=length))) for length in (long, short)
    ]
    times = take_turns(*steps, rounds=7)
    each = Times([time / long for time in times.ours], [time / short for time in times.peer])
    case = {**_SIZES._replace(length=long).case, "freed": freed}
    report(each, benchmark=_NAME, peer=f"ours at L={short}, a token", case=case, limit=1.1)


def _keep_freed_memory() -> None:
    """Have glibc keep it: neither length then waits for fresh pages of the system."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4
    assert libc.mallopt(trim_threshold, -1) and libc.mallopt(mmap_max, 0)


def _ours(sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    return Mamba2(
        sizes.hidden, num_heads=sizes.heads, head_dim=sizes.features, state_size=sizes.state
    )


def _theirs(sizes: Sizes, chunk: int) -> nn.Module:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config: Any = Mamba2Config(
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.features,
        state_size=sizes.state,
        n_groups=1,
        expand=sizes.heads * sizes.features // sizes.hidden,
        chunk_size=chunk,
        num_hidden_layers=1,
    )
    return Mamba2Mixer(config, layer_idx=0)


def _row(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """x and the gradient in y."""
    torch.manual_seed(1)
    x, dy = torch.randn(2, 1, sizes.length, sizes.hidden)
    return x.requires_grad_(), dy


def _step(mixer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = mixer(x)
    named = sorted(mixer.named_parameters())
    return y.detach(), *torch.autograd.grad(y, [x, *(weight for _, weight in named)], dy)


def _print_peak(side: str, chunk: int, sizes: Sizes) -> None:
    mixer = _ours(sizes) if side == "ours" else _theirs(sizes, chunk)
    whole, few = _row(sizes), _row(sizes._replace(length=64))
    print_peak(lambda: _step(mixer, *whole)[1:], warm_up=lambda: _step(mixer, *few))


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, chunk, *numbers = sys.argv[1:]
        torch.set_num_threads(1)
        _print_peak(side, int(chunk), Sizes(*map(int, numbers)))
        return
    for chunk in (256, 64):
        for threads in (1, 2):
            bench_transformers(_SIZES, chunk=chunk, threads=threads)
        bench_memory(_SIZES, chunk=chunk)
    for freed in ("given back", "kept"):  # in this order: what is set stays so
        for length in (4096, 16384, 65536):
            bench_lengths(1024, length, freed=freed)


if __name__ == "__main__":
    main()
