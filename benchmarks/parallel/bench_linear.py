"""Parallel linear layers against ``nn.Linear``, torch's ``parallelize_module`` and no messages.

A step is a forward pass, a square loss and a backward pass. Over ``LOCAL`` a layer must run the
kernels of ``nn.Linear``. On two ranks the work is the MLP of a transformer block, hidden to
4 x hidden and back; its silent twin has the same layers over torch's fake back end, which sends
nothing (and so computes something else).
"""

from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed import fake_pg

from benchmarks import peers
from benchmarks.timing import Work, on_ranks, report, take_turns
from megablocks_core.groups import Group
from megablocks_core.parallel import ColumnParallelLinear, RowParallelLinear

_NAME = "parallel/linear"
_WIDE = {"hidden": 2048, "tokens": 256}


def bench_local(layer_class: type[ColumnParallelLinear] | type[RowParallelLinear]) -> None:
    """Each layer over ``LOCAL`` against ``nn.Linear``."""
    for hidden, tokens, repeats in ((16, 4, 200), (256, 64, 40), (2048, 64, 1)):
        peer = nn.Linear(hidden, hidden)
        layers, x_TH = (layer_class.from_linear(peer), peer), torch.ones(tokens, hidden)
        steps = [_step(layer, x_TH) for layer in layers]
        for mine, theirs in zip(steps[0](), steps[1](), strict=True):
            assert torch.equal(mine, theirs)
        assert _kernels(steps[0]) == _kernels(steps[1])
        forwards = [partial(layer, x_TH) for layer in layers]
        for work, pair in {"step": steps, "forward": forwards}.items():
            case = {"layer": layer_class.__name__, "work": work, "hidden": hidden, "tokens": tokens}
            times = take_turns(*pair, repeats=repeats, rounds=41)
            report(times, benchmark=_NAME, peer="nn.Linear", case=case, limit=1.05)


def bench_against_torch(group: Group) -> None:
    """An MLP against the one that torch cuts."""
    narrow = ({"hidden": 256, "tokens": tokens} for tokens in (64, 512))
    for case, repeats, limit in zip((*narrow, _WIDE), (20, 5, 1), (0.85, 0.85, 1.02), strict=True):
        whole, x_TH = _mlp(case["hidden"]), torch.randn(case["tokens"], case["hidden"])
        ours, peer = _cut(whole, group), peers.torch_mlp(deepcopy(whole), group=group)
        steps = [_step(mlp, x_TH) for mlp in (ours, peer)]
        for mine, theirs in zip(steps[0](), steps[1](), strict=True):
            peers.assert_close_by_norm(mine, theirs)
        peers.assert_equal_gradients(ours, peer)
        times = take_turns(*steps, repeats=repeats, group=group)
        report(times, benchmark=_NAME, peer=peers.TORCH, case=case, limit=limit, group=group)


def bench_against_silence(group: Group) -> None:
    """An MLP against its twin without messages."""
    assert fake_pg  # the import makes the back end known
    silence = dist.new_group(backend="fake")
    assert isinstance(silence, dist.ProcessGroup)
    silent = Group.of(silence)
    whole, x_TH = _mlp(_WIDE["hidden"]), torch.randn(_WIDE["tokens"], _WIDE["hidden"])
    steps = [_step(_cut(whole, ranks), x_TH) for ranks in (group, silent)]
    for mine, theirs in zip(steps[0](), _step(whole, x_TH)(), strict=True):
        peers.assert_close_by_norm(mine, theirs)
    times = take_turns(*steps, group=group)
    report(times, benchmark=_NAME, peer="no messages", case=_WIDE, limit=1.05, group=group)


def _mlp(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))


def _cut(whole: nn.Sequential, group: Group) -> nn.Sequential:
    column, activation, row = whole
    assert isinstance(column, nn.Linear) and isinstance(row, nn.Linear)
    return nn.Sequential(
        ColumnParallelLinear.from_linear(column, group=group),
        activation,
        RowParallelLinear.from_linear(row, group=group),
    )


def _step(module: nn.Module, x_TH: Tensor) -> Work:
    """Forward and backward; gives the output and the gradient of the input, both arrived."""
    x_TH = x_TH.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        x_TH.grad = None
        module.zero_grad()
        y_TH = module(x_TH)
        y_TH.square().sum().backward()
        assert x_TH.grad is not None
        return y_TH, peers.arrived(x_TH.grad)

    return step


def _kernels(step: Work) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.events() or ()
    return [event.name for event in events if event.name.startswith("aten::")]


def main() -> None:
    """Print one JSON line a case."""
    torch.set_num_threads(1)
    bench_local(ColumnParallelLinear)
    bench_local(RowParallelLinear)
    on_ranks(bench_against_torch)
    on_ranks(bench_against_silence)


if __name__ == "__main__":
    main()
