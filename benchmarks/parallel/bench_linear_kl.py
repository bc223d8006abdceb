"""The divergence of two heads without logits against ``vocab_parallel_kl`` of whole logits.

A vocabulary of 16384, hidden sizes 256 (student) and 384 (teacher) and weights of std 0.02, as in
the benchmark of the cross-entropy and for its reasons. A step is the loss and its gradients in
the student's hidden states and weight; the peer computes the logits of both.

A line whose case has ``mib`` is about memory: its ratio is that of peaks beyond inputs and
gradients, each of a process of its own that does one step, and its times are those of the steps.
"""

import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.peaks import peak_of, print_peak, report_peaks
from benchmarks.timing import report, take_turns
from megablocks_core.parallel import StoredTopK, TeacherHead, linear_kl, vocab_parallel_kl

_NAME, _PEER = "parallel/linear_divergence", "vocab_parallel_kl of F.linear"
_VOCAB, _HIDDEN, _TEACHER, _STORED = 1 << 14, 256, 384, 32

Inputs = tuple[Tensor, Tensor, TeacherHead | StoredTopK]


def bench_time(tokens: int, whose: str, direction: str, reduction: str, *, threads: int) -> None:
    """Steps of both in turns."""
    torch.set_num_threads(threads)
    inputs = _inputs(tokens, whose)
    ours = partial(_ours, *inputs, direction, reduction)
    peer = partial(_peer, *inputs, direction, reduction)
    for mine, theirs in zip(ours(), peer(), strict=True):
        assert (mine - theirs).norm() / theirs.norm() < 1e-4
    case = {"tokens": tokens, "teacher": whose, "direction": direction, "reduction": reduction}
    times = take_turns(ours, peer, rounds=5)
    report(times, benchmark=_NAME, peer=_PEER, case=case, threads=threads)


def bench_memory(tokens: int, whose: str, *, against: tuple[str, int], peer: str) -> None:
    """The peak of one step of ours against that of another step."""
    module = "benchmarks.parallel.bench_linear_kl"
    report_peaks(
        peak_of(module, "ours", tokens, whose),
        peak_of(module, *against, whose),
        benchmark=_NAME,
        whom=peer,
        case={"tokens": tokens, "teacher": whose},
        limit=None,
        threads=torch.get_num_threads(),
    )


def _inputs(tokens: int, whose: str) -> Inputs:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, _HIDDEN, requires_grad=True)
    weight = torch.empty(_VOCAB, _HIDDEN).normal_(std=0.02).requires_grad_()
    if whose == "head":
        teacher = torch.randn(tokens, _TEACHER), torch.empty(_VOCAB, _TEACHER).normal_(std=0.02)
        return hidden, weight, TeacherHead(*teacher)
    # Places of their own for each token, and together half of the mass.
    start = torch.randint(_VOCAB // _STORED, (tokens, 1))
    indices = start * _STORED + torch.arange(_STORED)
    log_probs = (torch.randn(tokens, _STORED).softmax(-1) / 2).log()
    return hidden, weight, StoredTopK(log_probs, indices)


def _ours(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead | StoredTopK,
    direction: str,
    reduction: str,
) -> tuple[Tensor, ...]:
    loss = linear_kl(hidden, weight, teacher, direction=direction, reduction=reduction)
    return loss, *torch.autograd.grad(loss.sum(), (hidden, weight))


def _peer(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead | StoredTopK,
    direction: str,
    reduction: str,
) -> tuple[Tensor, ...]:
    whole = isinstance(teacher, TeacherHead)
    whose = linear(teacher.hidden, teacher.weight) if whole else teacher
    loss = vocab_parallel_kl(
        linear(hidden, weight), whose, direction=direction, reduction=reduction
    )
    return loss, *torch.autograd.grad(loss.sum(), (hidden, weight))


def _print_peak(side: str, tokens: int, whose: str) -> None:
    inputs = _inputs(tokens, whose)
    step = _ours if side == "ours" else _peer
    few = _inputs(4, whose)
    print_peak(
        lambda: step(*inputs, "forward", "mean")[1:],
        warm_up=lambda: step(*few, "forward", "mean"),
    )


def main() -> None:
    """Print one JSON line a case."""
    if len(sys.argv) > 1:
        side, tokens, whose = sys.argv[1:]
        _print_peak(side, int(tokens), whose)
        return
    for whose, direction, reduction in (
        ("head", "forward", "mean"),
        ("head", "reverse", "mean"),
        ("head", "forward", "none"),
        ("stored", "forward", "mean"),
    ):
        bench_time(256, whose, direction, reduction, threads=2)
    for whose in ("head", "stored"):
        bench_memory(2048, whose, against=("peer", 2048), peer=_PEER)
        bench_memory(2048, whose, against=("ours", 512), peer="ours, 512 tokens")


if __name__ == "__main__":
    main()
