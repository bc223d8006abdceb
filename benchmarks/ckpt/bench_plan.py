"""What planning a save and a load costs: 1,024 ranks, 2,000 tensors, one core, beside two seconds.

A quarter of the tensors are weights, which are brought together; the others are optimizer state,
written as it lies. Layouts: tp 8 x pp 16 x dp 8, with the state cut over dp as flat ranges; all
cut over 1,024 ranks; and the same with a shape of its own for every tensor.
"""

import time
from collections.abc import Callable

import torch

from benchmarks.timing import Times, report
from megablocks_core.ckpt.manifest import Chunk, StoredAs
from megablocks_core.ckpt.plans.boxes import flat_boxes, moved
from megablocks_core.ckpt.plans.load_plan import plan_load
from megablocks_core.ckpt.plans.outlines import Outline, holdings, pack
from megablocks_core.ckpt.plans.save_plan import plan_save
from megablocks_core.files.safetensors import DTYPE_CODES
from megablocks_core.groups.cuts import Box, chunk_slice

RANKS, TENSORS, ROUNDS, LIMIT_S = 1024, 2000, 3, 2.0


def three_axes(rank: int) -> list[Outline]:
    """What one rank holds under tp 8 x pp 16 x dp 8."""
    tp, dp, pp = rank % 8, rank // 8 % 8, rank // 64
    outlines = []
    for index in range(pp * TENSORS // 16, (pp + 1) * TENSORS // 16):
        shape = (4096, 1024 * (1 + index % 4))
        share: Box = (chunk_slice(shape[0], 8, tp), slice(0, shape[1]))
        boxes = [share]
        if index % 4:  # optimizer state
            numel = shape[0] // 8 * shape[1]
            flat = chunk_slice(numel, 8, dp)
            inner = flat_boxes(flat.start, flat.stop, (shape[0] // 8, shape[1]))
            boxes = [moved(box, share) for box in inner]
        outlines.append(_outline(index, shape, boxes))
    return outlines


def all_cut(rank: int) -> list[Outline]:
    """What one rank holds when all is cut over 1,024 ranks."""
    return [
        _outline(index, shape, [(chunk_slice(4096, RANKS, rank), slice(0, shape[1]))])
        for index in range(TENSORS)
        for shape in [(4096, 1024 * (1 + index % 4))]
    ]


def all_cut_all_different(rank: int) -> list[Outline]:
    """The same, where no two tensors have the same shape."""
    return [
        _outline(index, (4096, width), [(chunk_slice(4096, RANKS, rank), slice(0, width))])
        for index in range(TENSORS)
        for width in [64 + index]
    ]


def _outline(index: int, shape: tuple[int, ...], boxes: list[Box]) -> Outline:
    whole = index % 4 == 0
    entry, dtype = ("model", torch.bfloat16) if whole else ("optimizer", torch.float32)
    return Outline(f"{entry}/layers.{index}.weight", dtype, shape, boxes, whole)


def stored_whole(layout: Callable[[int], list[Outline]]) -> dict[str, StoredAs]:
    """All tensors of a layout in one file each, whole."""
    stored: dict[str, StoredAs] = {}
    for rank in range(RANKS):
        for one in layout(rank):
            chunk = Chunk(one.name, 4096, (0,) * len(one.shape), one.shape)
            stored.setdefault(one.name, StoredAs(DTYPE_CODES[one.dtype], one.shape, [chunk]))
    return stored


def seconds(work: Callable[[], object]) -> float:
    """Time one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print two JSON lines a layout."""
    for layout in (three_axes, all_cut, all_cut_all_different):
        packed = [pack(layout(rank)) for rank in range(RANKS)]
        stored = stored_whole(layout)
        plans = {
            "save": lambda packed=packed: plan_save(holdings(packed), 5, num_ranks=RANKS),
            "load": lambda packed=packed, stored=stored: plan_load(
                holdings(packed), stored, 5, hosts=[rank // 8 for rank in range(RANKS)]
            ),
        }
        for command, plan in plans.items():
            report(
                Times([seconds(plan) for _ in range(ROUNDS)], [LIMIT_S] * ROUNDS),
                benchmark="ckpt/plan",
                peer="two seconds",
                case={"layout": layout.__name__, "command": command, "ranks": RANKS},
                limit=None if layout is all_cut_all_different else 1.0,
            )


if __name__ == "__main__":
    main()
