"""The loss without logits against ``F.cross_entropy`` of ``F.linear``: time and memory.

A vocabulary of 131072, hidden size 512 and weights of std 0.02, so that logits are as small as at
the start of training: with large ones exponentials become denormal, and slow arithmetic on those
is measured. A step is the loss and its gradients in hidden states and weight.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond inputs and
gradients, each of a process of its own that does one step, and its times are those of the steps.

Both sides multiply three times as large matrices as the logits are. Where a machine takes most of
its time for that, no loss can be much faster than another: the line of ``torch.mm`` is how long the
three products take alone, and the least that a ratio can be.

On a CPU without products of 16-bit numbers torch multiplies those a hundred times slower than
float32 ones. There the peer of 16-bit inputs is the loss of their float32 copies, against which
nothing is promised.
"""

import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import report, take_turns
from megablocks_core.parallel import linear_cross_entropy

_NAME, _PEER = "parallel/linear_cross_entropy", "F.linear and F.cross_entropy"
_VOCAB, _HIDDEN = 1 << 17, 512


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


def bench_products(tokens: int, *, threads: int) -> None:
    """The three products of a step alone, as large as ours are, against the peer's step."""
    torch.set_num_threads(threads)
    hidden_TH, weight_VH, targets_T = _inputs(tokens, torch.float32)
    h_TH, w_VH = hidden_TH.detach(), weight_VH.detach()
    blocks = [slice(start, start + 2048) for start in range(0, _VOCAB, 2048)]
    x_bn, dw_VH, dh_nH = torch.empty(2048, 256), torch.zeros_like(w_VH), torch.zeros(256, _HIDDEN)

    def products() -> None:
        for h_nH in h_TH.split(256):
            for block in blocks:
                torch.mm(w_VH[block], h_nH.t(), out=x_bn)
                dh_nH.addmm_(x_bn.t(), w_VH[block])
                dw_VH[block].addmm_(x_bn, h_nH)

    peer = partial(_peer, hidden_TH, weight_VH, targets_T, "mean", widens=False)
    times = take_turns(products, peer, rounds=7)
    case = {"tokens": tokens, "dtype": "float32", "products": "torch.mm alone"}
    report(times, benchmark=_NAME, peer=_PEER, case=case, threads=threads)


def bench_memory(
    tokens: int, dtype: str, *, against: tuple[str, int], peer: str, limit: float
) -> None:
    """The peak of one step of ours against that of another step."""
    module = "benchmarks.parallel.bench_linear_cross_entropy"
    report_peaks(
        peak_of(module, "ours", tokens, dtype),
        peak_of(module, *against, dtype),
        benchmark=_NAME,
        whom=peer,
        case={"tokens": tokens, "dtype": dtype},
        limit=limit,
        threads=2,
    )


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


def _print_peak(side: str, tokens: int, dtype: str) -> None:
    hidden, weight, targets = _inputs(tokens, getattr(torch, dtype))
    widens = dtype == "bfloat16" and not _multiplies_16_bits()
    step = _ours if side == "ours" else partial(_peer, widens=widens)
    print_peak(
        lambda: step(hidden, weight, targets, "mean")[1:],
        warm_up=lambda: step(hidden[:4], weight[:64], targets[:4] % 64, "mean"),
    )


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, tokens, dtype = sys.argv[1:]
        _print_peak(side, int(tokens), dtype)
        return
    for threads in (1, 2):
        bench_time(1024, "float32", "mean", threads=threads, limit=0.65)
        bench_products(1024, threads=threads)
        bench_time(1024, "float32", "none", threads=threads, limit=1.45)
        bench_time(1024, "bfloat16", "mean", threads=threads, limit=0.5)
    bench_time(4096, "float32", "mean", threads=2, limit=0.65)
    for dtype in ("float32", "bfloat16"):
        bench_memory(4096, dtype, against=("peer", 4096), peer=_PEER, limit=0.1)
        # One chunk of 16-bit numbers, 1024 tokens, takes less than many.
        bench_memory(16384, dtype, against=("ours", 4096), peer="ours, 4096 tokens", limit=1.05)


if __name__ == "__main__":
    main()
