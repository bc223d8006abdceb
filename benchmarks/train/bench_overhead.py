"""What timers, guards and ``watch`` cost a training loop, on at their documented settings.

The work is a step of a small decoder, timed, guarded and read; the peer is the same step without
these parts. Of 100 steps one is watched and two are sampled: these kinds are timed each on its
own, and their ratios weighed, which takes a hundredth of the time that whole rounds would. "Off"
has the parts in the loop switched off: a timer that is not enabled, and a watch that is removed.
"""

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import ROUNDS, Times, on_ranks, report, take_turns
from megablocks_core.groups import LOCAL, Group, Mesh
from megablocks_core.layers import Decoder, DecoderSpec
from megablocks_core.parallel import clip_grad_norm_, vocab_parallel_cross_entropy
from megablocks_core.train import FiniteGuard, SpikeGuard, StepTimer, watch

# How many of 100 steps are of a kind, and the ``every`` and ``sample_every`` that make all so.
_KINDS = {"ordinary": (97, 10**9, 0), "watched": (1, 1, 0), "sampled": (2, 10**9, 1)}
_CASE = {"hidden": 192, "layers": 2, "tokens": 1024, "vocabulary": 257}
_SPEC = DecoderSpec(_CASE["vocabulary"], _CASE["hidden"], 512, _CASE["layers"], 6, 2, 32)


class Loop:
    """A model in training, alone or with the parts around it."""

    def __init__(self, model: Decoder) -> None:
        self.model = deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, tokens: Tensor) -> None:
        """One step."""
        self._loss(tokens).backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1]).logits
        return vocab_parallel_cross_entropy(
            logits, tokens[:, 1:], vocab_size=_CASE["vocabulary"], group=self.model.tp
        )


class WatchedLoop(Loop):
    """The same with all parts: on, or off."""

    def __init__(
        self, model: Decoder, *, every: int, sample_every: int, group: Group, is_on: bool = True
    ) -> None:
        super().__init__(model)
        self.timer = StepTimer(sample_every=sample_every, enabled=is_on, group=group)
        self.watched = watch(self.model, every=every, step=1, group=group)
        self.guards = (FiniteGuard(), SpikeGuard()) if is_on else ()
        if not is_on:
            self.watched.remove()

    def step(self, tokens: Tensor) -> None:
        """One step."""
        timer = self.timer
        with timer("forward"):
            loss = self._loss(tokens)
        with timer("backward"):
            loss.backward()
        with timer("reduction"):
            self.watched.step()
            norm = clip_grad_norm_(self.model, 1.0)
        values = {"loss": loss.detach(), "grad_norm": norm}
        with timer("optimizer"):
            if all(guard(values) for guard in self.guards):
                self.optimizer.step()
            self.optimizer.zero_grad()
        timer.step(tokens=tokens.numel())
        timer.reduce()
        self.watched.read()


def bench(group: Group = LOCAL) -> None:
    """A step with its parts on, and off, against the step without them."""
    torch.manual_seed(0)
    mesh = None if group.size == 1 else Mesh(tp=group.size)
    model = Decoder(_SPEC, mesh=mesh)
    ranks = LOCAL if mesh is None else mesh.group("tp")
    ratios = [0.0] * ROUNDS
    for kind, (share, every, sample_every) in _KINDS.items():
        times = _take_turns(
            WatchedLoop(model, every=every, sample_every=sample_every, group=ranks),
            Loop(model),
            ranks,
        )
        _report(times, kind, None, ranks)
        for index, (ours, peer) in enumerate(zip(*times, strict=True)):
            ratios[index] += share / 100 * ours / peer
    peer = times.peer
    weighed = Times([ratio * t for ratio, t in zip(ratios, peer, strict=True)], peer)
    _report(weighed, "on", 1.02, ranks)
    off = WatchedLoop(model, every=1, sample_every=1, is_on=False, group=ranks)
    _report(_take_turns(off, Loop(model), ranks), "off", 1.005, ranks)


def _take_turns(ours: Loop, peer: Loop, group: Group) -> Times:
    tokens = torch.randint(_CASE["vocabulary"], (4, _CASE["tokens"] // 4 + 1))
    for _ in range(3):
        ours.step(tokens)
        peer.step(tokens)
    for mine, theirs in zip(ours.model.parameters(), peer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    steps = [partial(loop.step, tokens) for loop in (ours, peer)]
    return take_turns(*steps, repeats=2, group=group)


def _report(times: Times, parts: str, limit: float | None, group: Group) -> None:
    report(
        times,
        benchmark="train/overhead",
        peer="the loop alone",
        case={"parts": parts, **_CASE},
        limit=limit,
        group=group,
    )


def main() -> None:
    """Print one JSON line a case."""
    torch.set_num_threads(1)
    bench()
    on_ranks(bench)


if __name__ == "__main__":
    main()
