"""Random layouts of whole tensors over ranks, for property tests of the plans."""

import random
from math import prod

import torch

from megablocks_core.ckpt.plans.boxes import lengths, whole_box
from megablocks_core.ckpt.plans.outlines import Outline

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def random_layout(
    dice: random.Random, num_ranks: int, num_tensors: int, *, most_boxes: int = 12
) -> list[list[Outline]]:
    """For each rank what it holds; together the ranks hold every element, many twice or more."""
    held: list[list[Outline]] = [[] for _ in range(num_ranks)]
    for index in range(num_tensors):
        shape = tuple(
            dice.randint(0 if dice.random() < 0.05 else 1, 9) for _ in range(dice.randint(0, 3))
        )
        owners: dict[int, list] = {}
        for box in random_tiling(dice, shape, dice.randint(1, most_boxes)):
            for rank in dice.sample(range(num_ranks), min(dice.choice([1, 1, 2, 3]), num_ranks)):
                owners.setdefault(rank, []).append(box)
        if dice.random() < 0.2:
            owners[dice.randrange(num_ranks)] = [whole_box(shape)]
        if dice.random() < 0.2:
            owners.setdefault(dice.randrange(num_ranks), [])
        name, dtype = f"e{index % 2}/{index}", dice.choice(DTYPES)
        for rank, boxes in owners.items():
            boxes = boxes if prod(shape) else []
            held[rank].append(Outline(name, dtype, shape, boxes, index % 2 == 0))
    return held


def random_tiling(dice: random.Random, shape: tuple[int, ...], count: int) -> list:
    """About ``count`` boxes that hold every element of ``shape`` once."""
    boxes = [whole_box(shape)]
    for _ in range(count - 1 if shape else 0):
        box = boxes.pop(dice.randrange(len(boxes)))
        dim = dice.randrange(len(shape))
        if lengths(box)[dim] < 2:
            boxes.append(box)
            continue
        at = dice.randrange(box[dim].start + 1, box[dim].stop)
        for part in (slice(box[dim].start, at), slice(at, box[dim].stop)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return boxes
