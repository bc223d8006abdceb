"""Loading 512 MB into tensors that are there, every block verified, against readers that do not.

In one process, in turns, from files that the system still has in memory. The peers are torch's
distributed checkpoint and bare safetensors, of which each tensor is copied into its place.
"""

import tempfile
import warnings
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.timing import report, take_turns
from megablocks_core import ckpt

ROUNDS, TENSORS, SIDE = 7, 32, 2048


def _model() -> nn.ParameterDict:
    return nn.ParameterDict({str(n): torch.randn(SIDE, SIDE) for n in range(TENSORS)})


def bench(root: Path) -> None:
    """Both peers."""
    saved, loaded = _model(), _model()
    ckpt.save(root / "a", {"model": saved})
    dcp_save(saved.state_dict(), checkpoint_id=root / "b", no_dist=True)
    into = loaded.state_dict()

    def ours() -> None:
        ckpt.load(root / "a", {"model": loaded})

    def their_dcp() -> None:
        dcp_load(into, checkpoint_id=root / "b", no_dist=True)

    def bare() -> None:
        with safe_open(root / "a" / "model.safetensors", "pt") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))

    for load in (ours, their_dcp, bare):
        for tensor in into.values():
            tensor.zero_()
        load()
        assert all(torch.equal(into[name], tensor) for name, tensor in saved.items())
    peers = (("torch.distributed.checkpoint", their_dcp, 0.6), ("safetensors", bare, 1.5))
    for name, peer, limit in peers:
        report(
            take_turns(ours, peer, rounds=ROUNDS),
            benchmark="ckpt/loading",
            peer=name,
            case={"mb": TENSORS * SIDE * SIDE * 4 >> 20},
            limit=limit,
        )


def main() -> None:
    """Print one JSON line a case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        bench(Path(root))


if __name__ == "__main__":
    main()
