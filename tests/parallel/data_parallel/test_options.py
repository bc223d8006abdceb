"""Wrong options of a reduction are named."""

import pytest
import torch

from megablocks_core.groups import LOCAL
from megablocks_core.parallel.data_parallel.options import check_arguments


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, "dp", "group='dp' must be a Group"),
        (1, None, "expert_group=None must be a Group"),
        (2, 2, "replicate=2 must be a Group"),
        (3, "avg", "reduction='avg' must be"),
        (4, torch.int32, "reduce_dtype=torch.int32 must be a floating-point dtype"),
        (5, "bf16", "wire_dtype='bf16' must be a floating-point dtype"),
        (5, torch.float32, "wire_dtype=torch.float32 must be torch.bfloat16 or torch.float16"),
    ],
)
def test_each_is_checked(place, value, said):
    right = [LOCAL, LOCAL, LOCAL, "mean", torch.float32, torch.bfloat16]
    check_arguments(*right)
    with pytest.raises(ValueError, match=said):
        check_arguments(*right[:place], value, *right[place + 1 :])
