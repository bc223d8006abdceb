"""Saving 512 MB, hashed and synced, against torch's distributed checkpoint and bare safetensors.

In one process, in turns, on tmpfs and on the disk of the temporary folder. The old files are
deleted between the timings. Both peers write no hashes; the second syncs its file too.
"""

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.timing import WARM_UPS, Times, report
from megablocks_core import ckpt

ROUNDS, TENSORS, SIDE = 7, 32, 2048


def save_bare(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """One safetensors file, synced."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    descriptor = os.open(folder / "model.safetensors", os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def turns(ours: Callable[[Path], None], peer: Callable[[Path], None], root: Path) -> Times:
    """Time both saves in every round; what they wrote is deleted after each."""
    times = Times([], [])
    for index in range(WARM_UPS + ROUNDS):
        for side in (0, 1) if index % 2 else (1, 0):
            start = time.perf_counter()
            (ours, peer)[side](root / "run" / "a")
            if index >= WARM_UPS:
                times[side].append(time.perf_counter() - start)
            shutil.rmtree(root / "run")
            (root / "run").mkdir()
    return times


def bench(root: Path, where: str, dcp_limit: float) -> None:
    """One place, both peers."""
    state = nn.ParameterDict({str(n): torch.randn(SIDE, SIDE) for n in range(TENSORS)})
    tensors = state.state_dict()

    def ours(folder: Path) -> None:
        ckpt.save(folder, {"model": state})

    def their_dcp(folder: Path) -> None:
        dcp_save(tensors, checkpoint_id=folder, no_dist=True)

    def bare(folder: Path) -> None:
        save_bare(tensors, folder)

    (root / "run").mkdir()
    ours(root / "run" / "a")
    ckpt.verify(root / "run" / "a")
    read = load_file(root / "run" / "a" / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    shutil.rmtree(root / "run" / "a")
    peers = (("torch.distributed.checkpoint", their_dcp, dcp_limit), ("safetensors", bare, 1.3))
    for name, peer, limit in peers:
        report(
            turns(ours, peer, root),
            benchmark="ckpt/saving",
            peer=name,
            case={"mb": TENSORS * SIDE * SIDE * 4 >> 20, "on": where},
            limit=limit,
        )


def main() -> None:
    """Print one JSON line a case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for where, folder, limit in (("tmpfs", "/dev/shm", 0.4), ("disk", None, 0.6)):
        with tempfile.TemporaryDirectory(dir=folder) as root:
            bench(Path(root), where, limit)


if __name__ == "__main__":
    main()
