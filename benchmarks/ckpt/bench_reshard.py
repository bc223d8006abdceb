"""Loading on 4 ranks at tp 4 what was saved at tp 2 x dp 2, against torch's distributed checkpoint.

Matrices are cut by rows, or by rows and by columns in turn, as layers in pairs are. Every block is
verified; the peer verifies nothing. Files are those that the system still has in memory. Two cores
serve all ranks, or as many as there are.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.timing import on_ranks, report, take_turns
from megablocks_core import ckpt
from megablocks_core.groups import Group, Mesh, ShardSpec, mark
from megablocks_core.groups.whole import to_dtensor

ROUNDS, TENSORS, SIDE = 5, 16, 2048


def _model(tp: Group, dims: tuple[int, ...]) -> Any:
    """Matrices of one seed, cut along each of ``dims`` in turn."""
    model = nn.Module()
    for number in range(TENSORS):
        whole = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number))
        dim = dims[number % len(dims)]
        part = nn.Parameter(whole.chunk(tp.size, dim)[tp.rank].clone())
        model.register_parameter(f"w{number}", part)
        mark(model, f"w{number}", ShardSpec(dim, tp))
    return model


def _distributed(
    model: nn.Module, dims: tuple[int, ...], sizes: tuple[int, ...], tp: Group
) -> dict[str, Any]:
    """The same memory as DTensors."""
    mesh = init_device_mesh("cpu", sizes)
    return {
        name: to_dtensor(part, (ShardSpec(dims[number % len(dims)], tp),), mesh)
        for number, (name, part) in enumerate(model.named_parameters())
    }


def bench(group: Group) -> None:
    """One peer, two cuts."""
    pair, four = Mesh(tp=2).group("tp"), Mesh(tp=4).group("tp")
    for cut, dims in (("rows", (0,)), ("rows and columns", (0, 1))):
        with tempfile.TemporaryDirectory() as mine:
            _case(Path(group.broadcast_object(mine)), cut, dims, pair, four, group)
            group.barrier()


def _case(
    root: Path, cut: str, dims: tuple[int, ...], pair: Group, four: Group, group: Group
) -> None:
    saved, loaded, expected = _model(pair, dims), _model(four, dims), _model(four, dims)
    ckpt.save(root / "a", {"model": saved}, group=group)
    dcp_save(_distributed(saved, dims, (2, 2), pair), checkpoint_id=root / "b")
    into = _distributed(loaded, dims, (4,), four)

    def ours() -> None:
        ckpt.load(root / "a", {"model": loaded}, group=group)

    def theirs() -> None:
        dcp_load(into, checkpoint_id=root / "b")

    for load in (ours, theirs):
        with torch.no_grad():
            for part in loaded.parameters():
                part.zero_()
        load()
        for one, other in zip(loaded.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)
    times = take_turns(ours, theirs, rounds=ROUNDS, group=group)
    if group.rank == 0:
        report(
            times,
            benchmark="ckpt/reshard",
            peer="torch.distributed.checkpoint",
            case={
                "mb": TENSORS * SIDE * SIDE * 4 >> 20,
                "from": "tp 2 x dp 2",
                "to": "tp 4",
                "cut": cut,
            },
            limit=1 / 1.5,
            group=group,
        )


def main() -> None:
    """Print one JSON line a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(bench, size=4)


if __name__ == "__main__":
    main()
