"""Any box of a slice is that of the whole tensor's."""

import pytest
import torch

from megablocks_core.export.lazies import lazy, shape_of
from megablocks_core.export.trtllm.slices import (
    cut,
    joined,
    numbers,
    part,
    stacked,
    transposed,
    with_last_dim,
    with_means,
    with_zeros,
)

TABLE = torch.arange(30.0).view(6, 5)
WHOLE = lazy(TABLE, "F32")
MEAN = TABLE.mean(0, keepdim=True)
MADE = {
    "part": (part(WHOLE, 1, 3, 1), TABLE[:, 1:4]),
    "cut": (cut(WHOLE, 1, 3), TABLE[2:4]),
    "cut of a cut": (cut(cut(WHOLE, 1, 2), 2, 3), TABLE[5:6]),
    "joined": (joined([WHOLE, WHOLE], 1), torch.cat([TABLE, TABLE], 1)),
    "stacked": (stacked([WHOLE, WHOLE]), torch.stack([TABLE, TABLE])),
    "transposed": (transposed(WHOLE), TABLE.T),
    "zeros": (with_zeros(WHOLE, 8), torch.cat([TABLE, torch.zeros(2, 5)])),
    "means": (with_means(WHOLE, 8), torch.cat([TABLE, MEAN, MEAN])),
    "no more": (with_means(WHOLE, 6), TABLE),
    "last": (with_last_dim(WHOLE), TABLE[..., None]),
    "numbers": (numbers([1.0, 2.0, 3.0], 1), torch.tensor([[1.0], [2.0], [3.0]])),
}


@pytest.mark.parametrize("name", list(MADE))
def test_boxes(name):
    made, wanted = MADE[name]
    assert shape_of(made) == wanted.shape and made.get_dtype() == "F32"
    assert torch.equal(made[...], wanted)
    rows, *_ = wanted.shape
    for start in range(rows):
        for stop in range(start + 1, rows + 1):
            assert torch.equal(made[start:stop], wanted[start:stop])
            if wanted.dim() > 1 and wanted.shape[1] > 1:
                assert torch.equal(made[start:stop, 1:2], wanted[start:stop, 1:2])


def test_the_mean_is_of_sixteen_rows_and_is_rounded_once():
    table = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = with_means(lazy(table, "BF16"), 44)
    assert torch.equal(made[40:], table[:16].double().mean(0).bfloat16().expand(4, 3))


def test_a_slice_reads_no_more_than_its_own():
    read = []

    class Noted:
        def get_shape(self):
            return (6, 5)

        def get_dtype(self):
            return "F32"

        def __getitem__(self, box):
            read.append(box)
            return TABLE[box]

    assert torch.equal(cut(Noted(), 1, 3)[0:1, 2:4], TABLE[2:3, 2:4])
    assert read == [(slice(2, 3), slice(2, 4))]
