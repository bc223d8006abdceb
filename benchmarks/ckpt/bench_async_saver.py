"""How long an asynchronous save of 512 MB holds training up, against one copy of the state.

The stall is the call of ``save``; the writing that follows ends before the next round. Both copy
into memory that they have used before.
"""

import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.timing import WARM_UPS, Times, report
from megablocks_core import ckpt

ROUNDS, TENSORS, SIDE = 11, 32, 2048


def main() -> None:
    """Print one JSON line."""
    torch.set_num_threads(1)
    state = nn.ParameterDict({str(n): torch.randn(SIDE, SIDE) for n in range(TENSORS)})
    room, times = torch.empty(TENSORS, SIDE, SIDE), Times([], [])
    with tempfile.TemporaryDirectory() as folder, ckpt.AsyncSaver() as saver:
        path = Path(folder) / "run" / "a"

        def ours() -> None:
            saver.save(path, {"model": state})

        def copy() -> None:
            for place, tensor in zip(room, state.values(), strict=True):
                place.copy_(tensor.detach())

        for index in range(WARM_UPS + ROUNDS):
            for side in (0, 1) if index % 2 else (1, 0):
                start = time.perf_counter()
                (ours, copy)[side]()
                if index >= WARM_UPS:
                    times[side].append(time.perf_counter() - start)
                saver.wait()
            if index == 0:
                assert all(map(torch.equal, room, state.values()))
                ckpt.verify(path)
            shutil.rmtree(path)
    report(
        times,
        benchmark="ckpt/async stall",
        peer="one copy of the state",
        case={"mb": TENSORS * SIDE * SIDE * 4 >> 20},
        limit=1.2,
    )


if __name__ == "__main__":
    main()
