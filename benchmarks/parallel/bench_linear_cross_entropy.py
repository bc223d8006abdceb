"""The loss without logits against ``F.cross_entropy`` of ``F.linear``: time and memory.

A vocabulary of 131072, hidden size 512 and weights of std 0.02, so that logits are as small as at
the start of training: with large ones exponentials become denormal, and slow arithmetic on those
is measured. A step is the loss and its gradients in hidden states and weight.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond inputs and
gradients, each of a process of its own that does one step, and its times are those of the steps.

On a CPU without products of 16-bit numbers torch multiplies those a hundred times slower than
float32 ones. There the peer of 16-bit inputs is the loss of their float32 copies, against which
nothing is promised.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.timing import Result, report, take_turns
from megablocks_core.parallel import linear_cross_entropy

_NAME, _PEER = "parallel/linear_cross_entropy", "F.linear and F.cross_entropy"
_VOCAB, _HIDDEN = 1 << 17, 512
_MIB = 1 << 20


def bench_time(tokens: int, dtype: str, reduction: str, *, threads: int, limit: float) -> None:
    """Steps of both in turns."""
    torch.set_num_threads(threads)
    inputs = _inputs(tokens, getattr(torch, dtype))
    widens = dtype == "bfloat16" and not _multiplies_16_bits()
    peer = partial(_peer, *inputs, reduction, widens=widens)
    ours = partial(_ours, *inputs, reduction)
    for mine, theirs in zip(ours(), peer(), strict=True):
        distance = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert distance < (1e-5 if dtype == "float32" else 1e-2)
    case = {"tokens": tokens, "dtype": dtype, "reduction": reduction}
    whom = _PEER + " in float32" * widens
    times = take_turns(ours, peer, rounds=7)
    bound = None if widens else limit
    report(times, benchmark=_NAME, peer=whom, case=case, limit=bound, threads=threads)


def bench_memory(
    tokens: int, dtype: str, *, against: tuple[str, int], peer: str, limit: float
) -> None:
    """The peak of one step of ours against that of another step."""
    ours_mib, ours_ms = _in_a_process("ours", tokens, dtype)
    peer_mib, peer_ms = _in_a_process(against[0], against[1], dtype)
    case = {"tokens": tokens, "dtype": dtype, "mib": ours_mib, "peer_mib": peer_mib}
    ratio = round(ours_mib / peer_mib, 3)
    result = Result(_NAME, peer, case, 1, 2, ours_ms, peer_ms, ratio, limit)
    print(json.dumps(asdict(result)), flush=True)


def _inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_TH = torch.randn(tokens, _HIDDEN, dtype=dtype, requires_grad=True)
    weight_VH = torch.empty(_VOCAB, _HIDDEN, dtype=dtype).normal_(std=0.02).requires_grad_()
    return hidden_TH, weight_VH, torch.randint(_VOCAB, (tokens,))


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    return loss, *torch.autograd.grad(loss.sum(), (hidden, weight))


def _peer(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str, *, widens: bool
) -> tuple[Tensor, ...]:
    wide = (hidden.float(), weight.float()) if widens else (hidden, weight)
    loss = cross_entropy(linear(*wide), targets, reduction=reduction)
    return loss, *torch.autograd.grad(loss.sum(), (hidden, weight))


def _multiplies_16_bits() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _in_a_process(side: str, tokens: int, dtype: str) -> tuple[int, float]:
    """MiB beyond inputs and gradients, and milliseconds, of one step."""
    command = [sys.executable, "-m", "benchmarks.parallel.bench_linear_cross_entropy"]
    command += [side, str(tokens), dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(json.loads(done.stdout))


def _print_peak(side: str, tokens: int, dtype: str) -> None:
    hidden, weight, targets = _inputs(tokens, getattr(torch, dtype))
    widens = dtype == "bfloat16" and not _multiplies_16_bits()
    step = _ours if side == "ours" else partial(_peer, widens=widens)
    step(hidden[:4], weight[:64], targets[:4] % 64, "mean")  # what a first step sets up
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before, start = _kib("VmRSS"), time.perf_counter()
    _, *gradients = step(hidden, weight, targets, "mean")
    seconds = time.perf_counter() - start
    given = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    beyond = (_kib("VmHWM") - before) * 1024 - given
    print(json.dumps([round(beyond / _MIB), round(seconds * 1e3, 1)]))


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, tokens, dtype = sys.argv[1:]
        _print_peak(side, int(tokens), dtype)
        return
    for threads in (1, 2):
        bench_time(1024, "float32", "mean", threads=threads, limit=0.65)
        bench_time(1024, "float32", "none", threads=threads, limit=1.45)
        bench_time(1024, "bfloat16", "mean", threads=threads, limit=0.5)
    bench_time(4096, "float32", "mean", threads=2, limit=0.65)
    for dtype in ("float32", "bfloat16"):
        bench_memory(4096, dtype, against=("peer", 4096), peer=_PEER, limit=0.1)
        bench_memory(16384, dtype, against=("ours", 1024), peer="ours, 1024 tokens", limit=1.05)


if __name__ == "__main__":
    main()
