"""Shapes that break kernels, and how close interpreted kernels come to their twins."""

import torch

# Places of each expert, and places that stay empty at the end.
COUNTS = {
    "nothing": ([0, 0], 0),
    "one_row": ([0, 1, 0], 0),
    "around_a_tile": ([127, 128, 129], 0),
    "all_to_one": ([0, 0, 200, 0], 0),
    "empty_places": ([3, 0, 66], 7),
    "one_expert": ([65], 0),
}

# The interpreter cuts float32 to bfloat16 where torch rounds: one unit in the last place.
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2},
}


def fenced(rows):
    """The same rows, before and after which lies NaN."""
    fence = torch.full_like(
        rows[:1] if len(rows) else rows.new_empty(1, *rows.shape[1:]), torch.nan
    )
    return torch.cat([fence, rows, fence])[1:-1]


def order(counts, empty, num_rows):
    """Rows of each place, one in five of them missing, and the places of each row [M N]."""
    num_places = sum(counts) + empty
    rows = torch.randint(max(num_rows, 1), (num_places,))
    rows[torch.rand(num_places) < 0.2] = -1
    rows[sum(counts) :] = -1
    if num_rows == 0:
        rows.fill_(-1)
    readers = [(rows == row).nonzero().flatten() for row in range(num_rows)]
    places = torch.full((num_rows, max([1, *map(len, readers)])), -1)
    for row, reading in enumerate(readers):
        places[row, : len(reading)] = reading
    return rows, places.flip(1)
